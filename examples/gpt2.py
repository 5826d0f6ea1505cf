"""A small GPT-2 and its data, which the training loops in this folder share: a model file.

The data is a text, one byte per token. White space is not predicted, so rows have unequal
numbers of labels.
"""

from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel

TEXT = Path(__file__).resolve().parent / "data" / "text.txt"
ROWS, LENGTH = 16, 32

seed = 0


def model():
    config = GPT2Config(
        vocab_size=256, n_positions=LENGTH, n_embd=32, n_layer=2, n_head=2, use_cache=False,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    net = GPT2LMHeadModel(config)
    net.loss_type = "ForCausalLM"  # the default, named to avoid a warning in each forward
    return net


def batch():
    tokens = torch.randint(256, (ROWS, LENGTH))
    return {"input_ids": tokens, "labels": tokens.clone()}


def optimizer(params):
    return torch.optim.AdamW(params, lr=1e-3)


def dataset() -> list[dict[str, torch.Tensor]]:
    """Return rows of ``input_ids`` and ``labels``, each of shape (LENGTH,)."""
    tokens = torch.tensor(list(TEXT.read_bytes()))
    rows = tokens[: len(tokens) // LENGTH * LENGTH].view(-1, LENGTH)
    blank = (rows == ord(" ")) | (rows == ord("\n"))
    labels = rows.masked_fill(blank, -100)
    return [{"input_ids": x, "labels": y} for x, y in zip(rows, labels, strict=True)]


def trainer_batch():
    """The batch as the Trainer of transformers gives it to the model: with its number of labels."""
    return batch() | {"num_items_in_batch": torch.tensor(1.0)}


def trainer():
    return model()
