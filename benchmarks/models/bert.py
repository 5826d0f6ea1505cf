"""BERT-base from Hugging Face transformers, trained to fill in masked tokens.

``small`` trains on the English text in ``benchmarks/data``, word by word.
"""

import re
from pathlib import Path

import torch
from transformers import BertConfig, BertForMaskedLM

TEXT = Path(__file__).resolve().parents[1] / "data" / "prose.txt"
MASK = 0  # the token that replaces a hidden one
IGNORED = -100  # the label of positions that do not count in the loss

seed = 0


def build(
    layers: int = 12,
    hidden: int = 768,
    heads: int = 12,
    ffn: int = 3072,
    vocab: int = 30522,
    seq: int = 128,
    dropout: float = 0.1,
    attention_dropout: float = 0.0,
    tied: bool = True,
):
    """``seq``: the number of positions of the position embedding.

    ``tied``: the output layer shares the weight of the word embedding.
    """
    return BertForMaskedLM(
        BertConfig(
            num_hidden_layers=layers,
            hidden_size=hidden,
            num_attention_heads=heads,
            intermediate_size=ffn,
            vocab_size=vocab,
            max_position_embeddings=seq,
            hidden_dropout_prob=dropout,
            attention_probs_dropout_prob=attention_dropout,
            attn_implementation="sdpa",
            use_cache=False,
            tie_word_embeddings=tied,
        )
    )


def masked(tokens: torch.Tensor, hide: torch.Tensor):
    """Hide the tokens where ``hide`` is true; only these have a label. All: (batch, seq)."""
    return {
        "input_ids": tokens.masked_fill(hide, MASK),
        "labels": tokens.masked_fill(~hide, IGNORED),
    }


def inputs(size: int = 256, seq: int = 128, vocab: int = 30522):
    return masked(torch.randint(1, vocab, (size, seq)), torch.rand(size, seq) < 0.15)


def optimizer(params):
    return torch.optim.AdamW(params, lr=5e-4)


def model():
    return build()


def batch():
    return inputs()


def batch_64():
    return build()


def batch_64_batch():
    return inputs(size=64)


def batch_1024():
    return build()


def batch_1024_batch():
    return inputs(size=1024)


def layers_24():
    return build(layers=24)


def layers_48():
    return build(layers=48)


TINY = {"layers": 2, "hidden": 48, "heads": 4, "ffn": 92, "vocab": 101, "seq": 10}


def tiny():
    return build(**TINY, dropout=0.0)


def tiny_batch():
    return inputs(size=12, seq=10, vocab=101)


def tiny_dropout():
    return build(**TINY, dropout=0.2, attention_dropout=0.1)


tiny_dropout_batch = tiny_batch


def small():
    return build(layers=4, hidden=256, heads=4, ffn=1024, vocab=4096, seq=64, dropout=0.0)


def small_batch():
    return inputs(size=32, seq=64, vocab=4096)


def small_batches():
    """Yield random windows of the text, endlessly, the same ones in every process."""
    words = re.findall(r"\w+|[^\w\s]", TEXT.read_text(encoding="utf-8").lower())
    index = {word: i for i, word in enumerate(sorted(set(words)), start=1)}  # 0 is MASK
    tokens = torch.tensor([index[word] for word in words])
    generator = torch.Generator().manual_seed(seed)
    while True:
        starts = torch.randint(len(tokens) - 64, (32, 1), generator=generator)
        yield masked(
            tokens[starts + torch.arange(64)], torch.rand(32, 64, generator=generator) < 0.15
        )


def evenly_masked(size: int, seq: int, vocab: int, labels: int):
    """Give each row the same number of labels: means over rows and over labels then agree."""
    hide = torch.rand(size, seq).argsort(dim=1) < labels
    return masked(torch.randint(1, vocab, (size, seq)), hide)


def race():
    return build(layers=4, hidden=256, heads=4, ffn=1024, vocab=4096, seq=64, dropout=0.0)


def race_batch():
    return evenly_masked(32, 64, 4096, labels=10)


race_x4 = race


def race_x4_batch():
    return evenly_masked(4 * 32, 64, 4096, labels=10)


race_tiny = tiny


def race_tiny_batch():
    return evenly_masked(12, 10, 101, labels=3)
