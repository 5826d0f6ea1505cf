"""Llama from Hugging Face transformers: Llama 2 7B, Llama 3 8B, and tiny ones.

The 7B model has 27 GB of weights in fp32. It can be planned anywhere, since planning allocates
no weights; running it needs a cluster with enough memory.
"""

import torch
from transformers import LlamaConfig, LlamaForCausalLM


def build(
    layers: int = 32,
    hidden: int = 4096,
    heads: int = 32,
    kv_heads: int | None = None,
    ffn: int = 11008,
    vocab: int = 32000,
    seq: int = 2048,
    attention_dropout: float = 0.0,
):
    """``kv_heads``: None: one per query head, as in Llama 2 7B; fewer are shared by groups."""
    return LlamaForCausalLM(
        LlamaConfig(
            num_hidden_layers=layers,
            hidden_size=hidden,
            num_attention_heads=heads,
            num_key_value_heads=kv_heads or heads,
            intermediate_size=ffn,
            vocab_size=vocab,
            max_position_embeddings=seq,
            attention_dropout=attention_dropout,
            attn_implementation="sdpa",
            use_cache=False,
        )
    )


def inputs(size: int = 16, seq: int = 2048, vocab: int = 32000):
    tokens = torch.randint(vocab, (size, seq))
    return {"input_ids": tokens, "labels": tokens.clone()}  # the model shifts the labels itself


def optimizer(params):
    return torch.optim.AdamW(params, lr=3e-4)


def llama_7b():
    return build()


def llama_7b_batch():
    return inputs()


model = llama_7b
batch = llama_7b_batch


def batch_64():
    return build()


def batch_64_batch():
    return inputs(size=64)


def llama_3_8b():
    """Four query heads share a key and value head."""
    return build(kv_heads=8, ffn=14336, vocab=128256, seq=8192)


def llama_3_8b_batch():
    return inputs(seq=8192, vocab=128256)


def llama_3_8b_small():
    return llama_3_8b()


def llama_3_8b_small_batch():
    return inputs(size=4, seq=8192, vocab=128256)


TINY = {"layers": 2, "hidden": 48, "heads": 4, "ffn": 92, "vocab": 101, "seq": 10}


def tiny():
    return build(**TINY)


def tiny_batch():
    return inputs(size=12, seq=10, vocab=101)


def tiny_gqa():
    return build(**TINY, kv_heads=2)


tiny_gqa_batch = tiny_batch


def tiny_dropout():
    return build(**TINY, attention_dropout=0.1)


tiny_dropout_batch = tiny_batch
