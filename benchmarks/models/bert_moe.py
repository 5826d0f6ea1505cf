"""BERT with a mixture of experts in every second layer, in the einsum form of GShard.

Each expert takes at most ``capacity`` tokens of each sequence, so all shapes are known in
advance: the assignment of tokens to experts is data, in a dispatch tensor of zeros and ones,
never a shape or a branch. Tokens of a full expert bypass it on the residual.

Letters: b sequences, s tokens, e experts, c places in an expert, m hidden, f FFN width.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def one_hot(index: Tensor, size: int, dtype: torch.dtype) -> Tensor:
    """(...) -> (..., size); an index outside of 0..size-1 gives a row of zeros."""
    return (index.unsqueeze(-1) == torch.arange(size, device=index.device)).to(dtype)


def top2_gating(logits: Tensor, capacity: int) -> tuple[Tensor, Tensor]:
    """Choose two experts per token and a place for it in each.

    Args:
        logits: (b, s, e), the router's scores.
        capacity: Places per expert and sequence.

    Returns:
        combine: (b, s, e, c), the weight of each place in each token's output. Its non-zeros
            assign tokens to places; the first choices of all tokens are placed before any
            second choice.
        balance: A scalar, 1 when the experts are evenly used.
    """
    experts = logits.shape[-1]
    gates = logits.softmax(dim=-1)
    first = one_hot(gates.argmax(dim=-1), experts, gates.dtype)
    second = one_hot((gates * (1 - first)).argmax(dim=-1), experts, gates.dtype)

    gate1, gate2 = (gates * first).sum(-1), (gates * second).sum(-1)  # (b, s)
    total = gate1 + gate2
    place1 = ((first.cumsum(dim=1) - 1) * first).sum(-1)  # (b, s): number of earlier tokens
    taken = first.sum(dim=1, keepdim=True)  # (b, 1, e)
    place2 = ((second.cumsum(dim=1) - 1 + taken) * second).sum(-1)

    combine = sum(
        torch.einsum("bse,bsc->bsec", chosen * (gate / total).unsqueeze(-1), at)
        for chosen, gate, at in (
            (first, gate1, one_hot(place1, capacity, gates.dtype)),
            (second, gate2, one_hot(place2, capacity, gates.dtype)),
        )
    )
    # Per sequence: the share of tokens sent to each expert times its mean gate.
    balance = (first.mean(dim=1) * gates.mean(dim=1)).sum(-1).mean() * experts
    return combine, balance


class MixtureOfExperts(nn.Module):
    def __init__(self, hidden: int, ffn: int, experts: int, capacity_factor: float):
        super().__init__()
        self.capacity_factor = capacity_factor
        self.router = nn.Linear(hidden, experts, bias=False)
        self.up = nn.Parameter(torch.randn(experts, hidden, ffn) * 0.02)
        self.down = nn.Parameter(torch.randn(experts, ffn, hidden) * 0.02)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x: (b, s, m) -> the same shape, and the load-balancing loss."""
        experts = self.up.shape[0]
        capacity = math.ceil(self.capacity_factor * x.shape[1] / experts)
        combine, balance = top2_gating(self.router(x), capacity)
        dispatch = (combine > 0).to(x.dtype)
        chosen = torch.einsum("bsec,bsm->ebcm", dispatch, x)
        inner = F.gelu(torch.einsum("ebcm,emf->ebcf", chosen, self.up))
        outer = torch.einsum("ebcf,efm->ebcm", inner, self.down)
        return torch.einsum("bsec,ebcm->bsm", combine, outer), balance


class FeedForward(nn.Module):
    def __init__(self, hidden: int, ffn: int):
        super().__init__()
        self.up = nn.Linear(hidden, ffn)
        self.down = nn.Linear(ffn, hidden)

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        return self.down(F.gelu(self.up(x))), None


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
        b, s, _ = x.shape
        q, k, v = (
            project(x).view(b, s, -1, self.width).transpose(1, 2)
            for project in (self.query, self.key, self.value)
        )  # (b, heads, s, head_dim)
        dropout = self.dropout if self.training else 0.0
        x = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout)
        return self.out(x.transpose(1, 2).reshape(b, s, -1))


class Layer(nn.Module):
    def __init__(
        self, hidden: int, heads: int, ffn: nn.Module, dropout: float, attention_dropout: float
    ):
        super().__init__()
        self.attention = Attention(hidden, heads, attention_dropout)
        self.norm1 = nn.LayerNorm(hidden)
        self.ffn = ffn
        self.norm2 = nn.LayerNorm(hidden)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        x = self.norm1(x + self.dropout(self.attention(x)))
        y, balance = self.ffn(x)
        return self.norm2(x + self.dropout(y)), balance


class BertMoE(nn.Module):
    def __init__(self, layers, hidden: int, vocab: int, seq: int, dropout: float, balance: float):
        super().__init__()
        self.balance = balance
        self.word = nn.Embedding(vocab, hidden)
        self.position = nn.Parameter(torch.zeros(1, seq, hidden))
        self.norm = nn.LayerNorm(hidden)
        self.dropout = nn.Dropout(dropout)
        self.layers = nn.ModuleList(layers)
        self.head = nn.Linear(hidden, vocab)
        self.head.weight = self.word.weight
        self.cross_entropy = nn.CrossEntropyLoss()
        for module in self.modules():  # like BERT
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        """Both (b, s); labels are -100 at positions that do not count. Returns a scalar loss."""
        x = self.dropout(self.norm(self.word(input_ids) + self.position))
        balances = []
        for layer in self.layers:
            x, balance = layer(x)
            if balance is not None:
                balances.append(balance)
        loss = self.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())
        return loss + self.balance * torch.stack(balances).mean()


def build(
    layers: int = 12,
    hidden: int = 768,
    heads: int = 12,
    ffn: int = 3072,
    experts: int = 16,
    capacity_factor: float = 2.5,
    vocab: int = 30522,
    seq: int = 128,
    dropout: float = 0.1,
    attention_dropout: float = 0.0,
    balance: float = 0.01,
):
    """Layers 2, 4, 6, ... have experts. ``balance`` is the weight of the load-balancing loss."""

    def feed_forward(i: int) -> nn.Module:
        if i % 2:
            return MixtureOfExperts(hidden, ffn, experts, capacity_factor)
        return FeedForward(hidden, ffn)

    stack = [
        Layer(hidden, heads, feed_forward(i), dropout, attention_dropout) for i in range(layers)
    ]
    return BertMoE(stack, hidden, vocab, seq, dropout, balance)


def inputs(size: int = 256, seq: int = 128, vocab: int = 30522):
    tokens = torch.randint(1, vocab, (size, seq))
    hide = torch.rand(size, seq) < 0.15
    return {"input_ids": tokens.masked_fill(hide, 0), "labels": tokens.masked_fill(~hide, -100)}


def optimizer(params):
    return torch.optim.AdamW(params, lr=5e-4)


def model():
    return build()


def batch():
    return inputs()


TINY = {"layers": 2, "hidden": 48, "heads": 4, "ffn": 92, "experts": 6, "vocab": 101, "seq": 10}


def tiny():
    return build(**TINY, dropout=0.0)


def tiny_batch():
    return inputs(size=12, seq=10, vocab=101)


def tiny_dropout():
    return build(**TINY, dropout=0.2, attention_dropout=0.1)


tiny_dropout_batch = tiny_batch


def evenly_masked(size: int, seq: int, vocab: int, labels: int):
    """Give each row the same number of labels: means over rows and over labels then agree."""
    tokens = torch.randint(1, vocab, (size, seq))
    hide = torch.rand(size, seq).argsort(dim=1) < labels
    return {"input_ids": tokens.masked_fill(hide, 0), "labels": tokens.masked_fill(~hide, -100)}


def race():
    """Two experts per rank of four."""
    return build(
        layers=2, hidden=256, heads=4, ffn=1024, experts=8, vocab=4096, seq=64, dropout=0.0
    )


def race_batch():
    return evenly_masked(32, 64, 4096, labels=10)


race_x4 = race


def race_x4_batch():
    return evenly_masked(4 * 32, 64, 4096, labels=10)


race_tiny = tiny


def race_tiny_batch():
    return evenly_masked(12, 10, 101, labels=3)
