"""Vision Transformer, base size, on 32x32 images in patches of 4x4 (64 tokens and a class token).

Written in plain torch with ``scaled_dot_product_attention``, pre-norm, as in the ViT paper.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Attention(nn.Module):
    def __init__(self, hidden: int, heads: int, dropout: float):
        super().__init__()
        self.width = hidden // heads  # of a head
        self.dropout = dropout
        self.query = nn.Linear(hidden, hidden)
        self.key = nn.Linear(hidden, hidden)
        self.value = nn.Linear(hidden, hidden)
        self.out = nn.Linear(hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        """x: (batch, tokens, hidden) -> the same shape."""
        b, t, _ = x.shape
        q, k, v = (
            project(x).view(b, t, -1, self.width).transpose(1, 2)
            for project in (self.query, self.key, self.value)
        )  # (batch, heads, tokens, head_dim)
        dropout = self.dropout if self.training else 0.0
        x = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout)
        return self.out(x.transpose(1, 2).reshape(b, t, -1))


class Block(nn.Module):
    def __init__(self, hidden: int, heads: int, ffn: int, dropout: float, attention_dropout: float):
        super().__init__()
        self.norm1 = nn.LayerNorm(hidden)
        self.attention = Attention(hidden, heads, attention_dropout)
        self.norm2 = nn.LayerNorm(hidden)
        self.up = nn.Linear(hidden, ffn)
        self.down = nn.Linear(ffn, hidden)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.norm1(x)))
        return x + self.dropout(self.down(F.gelu(self.up(self.norm2(x)))))


class ViT(nn.Module):
    def __init__(
        self,
        image: int,
        patch: int,
        layers: int,
        hidden: int,
        heads: int,
        ffn: int,
        classes: int,
        dropout: float,
        attention_dropout: float,
    ):
        super().__init__()
        tokens = (image // patch) ** 2 + 1
        self.embed = nn.Conv2d(3, hidden, kernel_size=patch, stride=patch)
        self.token = nn.Parameter(torch.randn(1, 1, hidden) * 0.02)
        self.position = nn.Parameter(torch.randn(1, tokens, hidden) * 0.02)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(
            Block(hidden, heads, ffn, dropout, attention_dropout) for _ in range(layers)
        )
        self.norm = nn.LayerNorm(hidden)
        self.head = nn.Linear(hidden, classes)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        """images: (batch, 3, height, width), labels: (batch,). Returns the mean cross entropy."""
        x = self.embed(images).flatten(2).transpose(1, 2)  # (batch, patches, hidden)
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], dim=1)
        x = self.dropout(x + self.position)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)[:, 0]), labels)


def build(
    image: int = 32,
    patch: int = 4,
    layers: int = 12,
    hidden: int = 768,
    heads: int = 12,
    ffn: int = 3072,
    classes: int = 10,
    dropout: float = 0.1,
    attention_dropout: float = 0.0,
):
    return ViT(image, patch, layers, hidden, heads, ffn, classes, dropout, attention_dropout)


def inputs(size: int = 256, image: int = 32, classes: int = 10):
    return torch.randn(size, 3, image, image), torch.randint(classes, (size,))


def optimizer(params):
    return torch.optim.AdamW(params, lr=1e-3, weight_decay=0.05)


def model():
    return build()


def batch():
    return inputs()


def batch_64():
    return build()


def batch_64_batch():
    return inputs(size=64)


TINY = {"image": 12, "layers": 2, "hidden": 48, "heads": 4, "ffn": 92, "classes": 11}


def tiny():
    return build(**TINY, dropout=0.0)


def tiny_batch():
    return inputs(size=12, image=12, classes=11)


def tiny_dropout():
    return build(**TINY, dropout=0.2, attention_dropout=0.1)


tiny_dropout_batch = tiny_batch


def race():
    return build(layers=4, hidden=256, heads=4, ffn=1024, dropout=0.0)


def race_batch():
    return inputs(size=32)


race_x4 = race


def race_x4_batch():
    return inputs(size=4 * 32)


race_tiny, race_tiny_batch = tiny, tiny_batch
