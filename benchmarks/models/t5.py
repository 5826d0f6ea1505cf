"""T5-base from Hugging Face transformers: an encoder, and a decoder whose layers all read it.

One matrix embeds the tokens of both and produces the scores; one table of relative positions
biases the attention of all the encoder's layers, another that of all the decoder's. Every layer
reads these tensors, which makes the graph wider than that of a plain stack.
"""

import torch
import torch.nn.functional as F
from transformers import T5Config, T5ForConditionalGeneration

seed = 0


def build(
    layers: int = 12,
    hidden: int = 768,
    heads: int = 12,
    ffn: int = 3072,
    vocab: int = 32128,
    dropout: float = 0.1,
):
    """``layers``: the number of layers in the encoder, and in the decoder."""
    return T5ForConditionalGeneration(
        T5Config(
            num_layers=layers,
            num_decoder_layers=layers,
            d_model=hidden,
            d_kv=hidden // heads,
            d_ff=ffn,
            num_heads=heads,
            vocab_size=vocab,
            dropout_rate=dropout,
            tie_word_embeddings=True,
            use_cache=False,
        )
    )


def inputs(size: int = 64, seq: int = 128, target: int = 128, vocab: int = 32128):
    """The decoder reads the labels shifted by one, which a data loader does for this model."""
    labels = torch.randint(1, vocab, (size, target))
    return {
        "input_ids": torch.randint(1, vocab, (size, seq)),
        "decoder_input_ids": F.pad(labels[:, :-1], (1, 0)),
        "labels": labels,
    }


def optimizer(params):
    return torch.optim.AdamW(params, lr=1e-4)


def model():
    return build()


def batch():
    return inputs()


TINY = {"layers": 2, "hidden": 48, "heads": 4, "ffn": 92, "vocab": 101}


def tiny():
    return build(**TINY, dropout=0.0)


def tiny_batch():
    return inputs(size=12, seq=10, target=7, vocab=101)


def tiny_dropout():
    return build(**TINY, dropout=0.2)


tiny_dropout_batch = tiny_batch
