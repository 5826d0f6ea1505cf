"""Models of sequences of torch alone: a plain GPT, and torch's own encoder and decoder layers."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.zoo.entry import Built, Entry


class Block(nn.Module):
    """Causal attention, then a feed-forward network, each after a norm and around a shortcut."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.before_attention, self.before_ffn = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.ffn = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(dropout)
        )

    def forward(self, x: Tensor) -> Tensor:
        parts = self.query_key_value(self.before_attention(x)).chunk(3, dim=-1)
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in parts)
        dropout = self.dropout if self.training else 0.0
        seen = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        return x + self.ffn(self.before_ffn(x))


class PlainGPT(nn.Module):
    """A decoder in plain torch: learned positions, one matrix for tokens in and out."""

    def __init__(
        self, words: int, length: int, width: int, heads: int, layers: int, dropout: float
    ) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(words, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words, bias=False)
        nn.init.normal_(self.tokens.weight, std=0.02)
        self.head.weight = self.tokens.weight

    def forward(self, text: Tensor, following: Tensor) -> Tensor:
        x = self.tokens(text) + self.places(torch.arange(text.shape[1], device=text.device))
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), following.flatten())


class Classifier(nn.Module):
    """``nn.TransformerEncoder`` over padded text, and a class for the mean of its tokens."""

    def __init__(self, words: int, width: int, heads: int, layers: int, classes: int) -> None:
        super().__init__()
        self.words = nn.Embedding(words, width, padding_idx=0)
        layer = nn.TransformerEncoderLayer(
            width, heads, 4 * width, activation="gelu", batch_first=True, norm_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, classes)

    def forward(self, text: Tensor, labels: Tensor) -> Tensor:
        padding = text == 0
        hidden = self.encoder(self.words(text), src_key_padding_mask=padding)
        real = (~padding).to(hidden.dtype).unsqueeze(-1)
        mean = (hidden * real).sum(1) / real.sum(1)
        return F.cross_entropy(self.head(mean), labels)


class Captioner(nn.Module):
    """``nn.TransformerDecoder`` over text, with attention to the features of an image."""

    def __init__(self, words: int, width: int, heads: int, layers: int, features: int) -> None:
        super().__init__()
        self.words, self.features = nn.Embedding(words, width), nn.Linear(features, width)
        layer = nn.TransformerDecoderLayer(width, heads, 4 * width, batch_first=True)
        self.decoder = nn.TransformerDecoder(layer, layers, norm=nn.LayerNorm(width))
        self.head = nn.Linear(width, words)

    def forward(self, image: Tensor, text: Tensor, following: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(text.shape[1])
        hidden = self.decoder(
            self.words(text), self.features(image), tgt_mask=mask, tgt_is_causal=True
        )
        return F.cross_entropy(self.head(hidden).flatten(0, 1), following.flatten())


def _gpt(
    words: int, text: tuple[int, int], width: int, heads: int, layers: int, dropout: float
) -> Built:
    tokens = torch.randint(words, (text[0], text[1] + 1))
    model = PlainGPT(words, text[1], width, heads, layers, dropout)
    return model.train(), (tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())


def _classifier(
    words: int, text: tuple[int, int], width: int, heads: int, layers: int, classes: int
) -> Built:
    tokens = torch.randint(1, words, text)
    tokens[::2, -2:] = 0
    model = Classifier(words, width, heads, layers, classes)
    return model.train(), (tokens, torch.randint(classes, (text[0],)))


def _captioner(
    words: int, text: tuple[int, int], width: int, heads: int, layers: int, image: tuple[int, int]
) -> Built:
    tokens = torch.randint(words, text)
    model = Captioner(words, width, heads, layers, image[1])
    return model.train(), (torch.randn(text[0], *image), tokens, tokens.clone())


SEQUENCES = (
    Entry(
        name="plain-gpt", family="torch", brings="a decoder without a library, GPT-2's small size",
        tiny=partial(_gpt, 61, (6, 9), 24, 4, 2, 0.1),
        full=partial(_gpt, 50304, (32, 512), 768, 12, 12, 0.1),
    ),
    Entry(
        name="nn.TransformerEncoder", family="torch", brings="padded text, norms first",
        tiny=partial(_classifier, 61, (6, 9), 24, 4, 2, 7),
        full=partial(_classifier, 30522, (64, 256), 768, 12, 12, 20),
    ),
    Entry(
        name="nn.TransformerDecoder", family="torch", brings="attention to the features of images",
        tiny=partial(_captioner, 61, (6, 9), 24, 4, 2, (5, 10)),
        full=partial(_captioner, 32000, (64, 64), 512, 8, 6, (49, 2048)),
    ),
)  # fmt: skip
