"""Models of torch alone."""

from __future__ import annotations

import itertools
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.zoo.entry import Built, Entry


class Translator(nn.Module):
    """torch's own ``nn.Transformer`` between two embeddings."""

    def __init__(self, words: int, width: int, heads: int, layers: int, ffn: int) -> None:
        super().__init__()
        self.words = nn.Embedding(words, width)
        self.transformer = nn.Transformer(
            width, heads, layers, layers, ffn, batch_first=True, dropout=0.1
        )
        self.head = nn.Linear(width, words)

    def forward(self, source: Tensor, target: Tensor, labels: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1])
        hidden = self.transformer(self.words(source), self.words(target), tgt_mask=mask)
        return F.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten())


class Tagger(nn.Module):
    """A bidirectional LSTM that says a class per token."""

    def __init__(self, words: int, width: int, layers: int, tags: int) -> None:
        super().__init__()
        self.words = nn.Embedding(words, width)
        self.lstm = nn.LSTM(width, width, layers, batch_first=True, bidirectional=True)
        self.head = nn.Linear(2 * width, tags)

    def forward(self, text: Tensor, tags: Tensor) -> Tensor:
        hidden, _ = self.lstm(self.words(text))
        return F.cross_entropy(self.head(hidden).flatten(0, 1), tags.flatten())


class Speech(nn.Module):
    """Convolutions over time and frequency, then GRUs both ways (Deep Speech 2, Amodei et al. 2016)."""

    def __init__(self, bands: int, channels: int, width: int, layers: int, letters: int) -> None:
        super().__init__()
        self.convolutions = nn.Sequential(
            nn.Conv2d(1, channels, (11, 5), stride=(2, 2), padding=(5, 2)),
            nn.BatchNorm2d(channels), nn.Hardtanh(0, 20),
            nn.Conv2d(channels, channels, (11, 5), stride=(1, 2), padding=(5, 2)),
            nn.BatchNorm2d(channels), nn.Hardtanh(0, 20),
        )  # fmt: skip
        self.gru = nn.GRU(channels * (bands // 4), width, layers, bidirectional=True)
        self.head = nn.Linear(2 * width, letters)

    def forward(self, sound: Tensor, text: Tensor) -> Tensor:
        x = self.convolutions(sound.unsqueeze(1)).permute(2, 0, 1, 3).flatten(2)
        letters = self.head(self.gru(x)[0])
        return F.cross_entropy(letters.flatten(0, 1), text.flatten())


class Twice(nn.Sequential):
    """Two convolutions with group norm."""

    def __init__(self, given: int, made: int) -> None:
        super().__init__(
            nn.Conv2d(given, made, 3, padding=1, bias=False), nn.GroupNorm(4, made), nn.SiLU(),
            nn.Conv2d(made, made, 3, padding=1, bias=False), nn.BatchNorm2d(made), nn.ReLU(),
        )  # fmt: skip


class UNet(nn.Module):
    """Down by pooling, up by transposed convolution, with what was on the way (Ronneberger 2015)."""

    def __init__(self, widths: tuple[int, ...], classes: int) -> None:
        super().__init__()
        self.down = nn.ModuleList(Twice(a, b) for a, b in zip((3, *widths), widths, strict=False))
        pairs = list(zip(widths[:0:-1], widths[-2::-1], strict=True))
        self.up = nn.ModuleList(nn.ConvTranspose2d(a, b, 2, stride=2) for a, b in pairs)
        self.merge = nn.ModuleList(Twice(2 * b, b) for _, b in pairs)
        self.head = nn.Conv2d(widths[0], classes, 1)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        seen = []
        for k, layer in enumerate(self.down):
            x = layer(F.max_pool2d(x, 2) if k else x)
            seen.append(x)
        for up, merge, beside in zip(self.up, self.merge, seen[-2::-1], strict=True):
            x = merge(torch.cat([up(x), beside], 1))
        return F.cross_entropy(self.head(x), labels)


class Recommender(nn.Module):
    """Large tables and the products of all pairs of features (DLRM: Naumov et al., 2019)."""

    def __init__(self, tables: tuple[int, ...], width: int, dense: int, hidden: int) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(size, width) for size in tables)
        self.bottom = nn.Sequential(
            nn.Linear(dense, hidden), nn.ReLU(), nn.Linear(hidden, width), nn.ReLU()
        )
        count = len(tables) + 1
        pairs = torch.tril_indices(count, count, -1)
        self.register_buffer("rows", pairs[0])
        self.register_buffer("columns", pairs[1])
        self.top = nn.Sequential(
            nn.Linear(width + pairs.shape[1], hidden), nn.ReLU(), nn.Linear(hidden, 1)
        )

    def forward(self, numbers: Tensor, categories: Tensor, clicks: Tensor) -> Tensor:
        dense = self.bottom(numbers)
        found = [table(categories[:, k]) for k, table in enumerate(self.tables)]
        features = torch.stack([dense, *found], 1)
        products = torch.bmm(features, features.transpose(1, 2))[:, self.rows, self.columns]
        logits = self.top(torch.cat([dense, products], 1)).squeeze(-1)
        return F.binary_cross_entropy_with_logits(logits, clicks)


class GraphNetwork(nn.Module):
    """Graph convolutions over a dense adjacency (Kipf and Welling, 2017), attention over edges."""

    def __init__(self, features: int, width: int, layers: int, classes: int) -> None:
        super().__init__()
        sizes = [features, *[width] * layers]
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in itertools.pairwise(sizes))
        self.source, self.sink = nn.Linear(width, 1), nn.Linear(width, 1)
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor, edges: Tensor, labels: Tensor) -> Tensor:
        degree = edges.sum(-1, keepdim=True).clamp(min=1)
        for layer in self.layers:
            x = F.elu(layer(edges @ x / degree))
        scores = F.leaky_relu(self.source(x) + self.sink(x).transpose(-1, -2), 0.2)
        weights = scores.masked_fill(edges == 0, -1e9).softmax(-1)
        return F.cross_entropy(self.head((weights @ x).mean(-2)), labels)


def translator(
    words: int, width: int, heads: int, layers: int, ffn: int, text: tuple[int, int]
) -> Built:
    rows, length = text
    source, target = torch.randint(words, (rows, length)), torch.randint(words, (rows, length - 2))
    model = Translator(words, width, heads, layers, ffn)
    return model, (source, target, target.clone())


def tagger(words: int, width: int, layers: int, tags: int, text: tuple[int, int]) -> Built:
    model = Tagger(words, width, layers, tags)
    return model, {"text": torch.randint(words, text), "tags": torch.randint(tags, text)}


def speech(
    bands: int, channels: int, width: int, layers: int, letters: int, sound: tuple[int, int]
) -> Built:
    rows, frames = sound
    text = torch.randint(letters, (frames // 2, rows))
    return Speech(bands, channels, width, layers, letters), (torch.randn(*sound, bands), text)


def unet(widths: tuple[int, ...], classes: int, rows: int, size: int) -> Built:
    labels = torch.randint(classes, (rows, size, size))
    return UNet(widths, classes), (torch.randn(rows, 3, size, size), labels)


def recommender(tables: tuple[int, ...], width: int, dense: int, hidden: int, rows: int) -> Built:
    categories = torch.stack([torch.randint(size, (rows,)) for size in tables], 1)
    batch = {
        "numbers": torch.randn(rows, dense),
        "categories": categories,
        "clicks": torch.randint(2, (rows,)).float(),
    }
    return Recommender(tables, width, dense, hidden), batch


def graphs(features: int, width: int, layers: int, classes: int, rows: int, places: int) -> Built:
    model = GraphNetwork(features, width, layers, classes)
    edges = torch.randint(2, (rows, places, places)).float()
    return model, (
        torch.randn(rows, places, features), edges, torch.randint(classes, (rows,))
    )  # fmt: skip


def dense_experts(variant: str) -> Built:
    """A BERT of :mod:`benchmarks.models.bert_moe`: tokens go to experts by one-hot products."""
    from benchmarks.models import bert_moe

    make, batch = getattr(bert_moe, variant), getattr(bert_moe, f"{variant}_batch", bert_moe.batch)
    return make(), batch()


NATIVE = (
    Entry(
        name="bert-moe", family="mixture of experts",
        brings="sixteen experts with room for so many tokens each, by products (GShard)",
        tiny=partial(dense_experts, "tiny"), full=partial(dense_experts, "model"),
    ),
    Entry(
        name="nn.Transformer", family="torch", brings="torch's own layers, a batch by position",
        tiny=partial(translator, 61, 24, 4, 2, 40, (6, 9)),
        full=partial(translator, 32000, 512, 8, 6, 2048, (64, 128)),
    ),
    Entry(
        name="nn.LSTM", family="torch", brings="a recurrence, both ways",
        tiny=partial(tagger, 61, 24, 2, 7, (6, 5)),
        full=partial(tagger, 30522, 1024, 2, 50, (64, 512)),
    ),
    Entry(
        name="nn.GRU", family="torch", brings="a recurrence after convolutions, time first",
        tiny=partial(speech, 8, 3, 5, 2, 7, (6, 10)),
        full=partial(speech, 160, 32, 800, 7, 29, (64, 1000)),
    ),
    Entry(
        name="u-net", family="torch", brings="transposed convolutions, group and batch norm",
        tiny=partial(unet, (8, 12, 16), 5, 6, 16),
        full=partial(unet, (64, 128, 256, 512, 1024), 21, 32, 256),
    ),
    Entry(
        name="dlrm", family="torch", brings="tables of 16 million rows in all, products of pairs",
        tiny=partial(recommender, (11, 23, 5), 12, 6, 20, 10),
        full=partial(recommender, (10_000_000, 4_000_000, *[100_000] * 24), 64, 13, 512, 4096),
    ),
    Entry(
        name="graph", family="torch", brings="products with an adjacency of the batch",
        tiny=partial(graphs, 10, 24, 2, 7, 6, 9),
        full=partial(graphs, 256, 512, 4, 40, 64, 512),
    ),
)  # fmt: skip
