"""GPT-2 (124M) from Hugging Face transformers, trained to predict the next token.

``small`` trains on the English text in ``benchmarks/data``, word by word.
"""

import re
from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel

TEXT = Path(__file__).resolve().parents[1] / "data" / "prose.txt"

seed = 0


def build(
    layers: int = 12,
    hidden: int = 768,
    heads: int = 12,
    ffn: int = 3072,
    vocab: int = 50257,
    seq: int = 128,
    dropout: float = 0.1,
    attention_dropout: float = 0.0,
):
    """``seq``: the number of positions of the position embedding."""
    net = GPT2LMHeadModel(
        GPT2Config(
            n_layer=layers,
            n_embd=hidden,
            n_head=heads,
            n_inner=ffn,
            vocab_size=vocab,
            n_positions=seq,
            embd_pdrop=dropout,
            resid_pdrop=dropout,
            attn_pdrop=attention_dropout,
            bos_token_id=0,
            eos_token_id=0,
            attn_implementation="sdpa",
            use_cache=False,
        )
    )
    net.loss_type = "ForCausalLM"  # the default, which otherwise warns in each forward
    return net


def inputs(size: int = 64, seq: int = 128, vocab: int = 50257):
    tokens = torch.randint(vocab, (size, seq))
    return {"input_ids": tokens, "labels": tokens.clone()}  # the model shifts the labels itself


def optimizer(params):
    return torch.optim.AdamW(params, lr=5e-4)


def model():
    return build()


def batch():
    return inputs()


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
    index = {word: i for i, word in enumerate(sorted(set(words)))}
    tokens = torch.tensor([index[word] for word in words])
    generator = torch.Generator().manual_seed(seed)
    while True:
        starts = torch.randint(len(tokens) - 64, (32, 1), generator=generator)
        window = tokens[starts + torch.arange(64)]
        yield {"input_ids": window, "labels": window.clone()}


def race():
    return small()


def race_batch():
    return small_batch()


race_x4 = race


def race_x4_batch():
    return inputs(size=4 * 32, seq=64, vocab=4096)


race_tiny, race_tiny_batch = tiny, tiny_batch
