"""Values that are saved beside tensors, as JSON: numbers, tuples, small tensors, RNG states."""

from __future__ import annotations

import base64
import math
import random
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from hap.errors import InputError

SHARD = "$shard"
"""Marks an optimizer's state that is cut as its parameter is; the value is the dtype."""

LARGEST_TENSOR_BYTES = 2**20
"""Larger tensors belong in the module or the optimizer, whose shards are not JSON."""


def tensor_as_json(value: torch.Tensor, where: str) -> dict[str, Any]:
    """Return a tensor as JSON.

    Raises:
        InputError: it is larger than 1 MiB.
    """
    if value.numel() * value.element_size() > LARGEST_TENSOR_BYTES:
        raise InputError(
            f"{where} is a tensor of shape {tuple(value.shape)}, larger than 1 MiB",
            hint="register it as a buffer of the module: buffers are saved in shards",
        )
    flat = value.detach().cpu().contiguous().view(-1).view(torch.uint8)
    data = base64.b64encode(flat.numpy().tobytes()).decode()
    dtype = str(value.dtype).removeprefix("torch.")
    return {"$tensor": {"dtype": dtype, "shape": list(value.shape), "data": data}}


def encode(
    value: Any, where: str = "extra",
    tensor: Callable[[torch.Tensor, str], Any] = tensor_as_json,
) -> Any:  # fmt: skip
    """Return a value as JSON; :func:`decode` is the inverse.

    Args:
        where: the path of the value, for messages.
        tensor: returns a tensor as JSON, given its path.

    Raises:
        InputError: the value has no JSON form.
    """
    match value:
        case None | bool() | str():
            return value
        case int():
            return int(value)
        case float():
            return float(value) if math.isfinite(value) else {"$float": str(float(value))}
        case torch.Tensor():
            return tensor(value, where)
        case torch.dtype() | torch.device():
            return {f"${type(value).__name__}": str(value).removeprefix("torch.")}
        case bytes():
            return {"$bytes": base64.b64encode(value).decode()}
        case Counter():
            return {"$counter": _pairs(value, where, tensor)}
        case Mapping():
            if all(isinstance(key, str) and not key.startswith("$") for key in value):
                return {k: encode(entry, f"{where}.{k}", tensor) for k, entry in value.items()}
            return {"$dict": _pairs(value, where, tensor)}
        case tuple():
            return {"$tuple": encode([*value], where, tensor)}
        case list():
            return [encode(entry, f"{where}[{k}]", tensor) for k, entry in enumerate(value)]
    if type(value).__module__ == "numpy" and hasattr(value, "tolist"):
        return encode(value.tolist(), where, tensor)
    raise InputError(
        f"{where} is a {type(value).__name__}, which a checkpoint cannot hold",
        hint="save numbers, strings, lists, tuples, dicts and small tensors; call state_dict() "
        "of an object and save its result",
    )


def _pairs(value: Mapping[Any, Any], where: str, tensor: Callable[[Any, str], Any]) -> list[Any]:
    return [[encode(k, where), encode(v, f"{where}[{k!r}]", tensor)] for k, v in value.items()]


def decode(data: Any, shard: Callable[[Mapping[str, Any]], Any] | None = None) -> Any:
    """Return the value that :func:`encode` was given; tensors are on the CPU.

    Args:
        shard: returns what a dict with :data:`SHARD` stands for.
    """
    again = partial(decode, shard=shard)
    if isinstance(data, list):
        return [again(entry) for entry in data]
    if not isinstance(data, dict):
        return data
    if shard and SHARD in data:
        return shard(data)
    if len(data) == 1:
        ((kind, content),) = data.items()
        if kind in _DECODE:
            return _DECODE[kind](content, again)
    return {key: again(entry) for key, entry in data.items()}


def _read_tensor(content: Mapping[str, Any], again: Callable[[Any], Any]) -> torch.Tensor:
    raw = bytearray(base64.b64decode(content["data"]))
    dtype = getattr(torch, content["dtype"])
    flat = torch.frombuffer(raw, dtype=dtype) if raw else torch.empty(0, dtype=dtype)
    return flat.reshape(content["shape"]).clone()


_DECODE: Mapping[str, Callable[[Any, Callable[[Any], Any]], Any]] = {
    "$float": lambda text, again: float(text),
    "$tensor": _read_tensor,
    "$dtype": lambda name, again: getattr(torch, name),
    "$device": lambda name, again: torch.device(name),
    "$bytes": lambda text, again: base64.b64decode(text),
    "$counter": lambda pairs, again: Counter({again(k): again(v) for k, v in pairs}),
    "$dict": lambda pairs, again: {again(k): again(v) for k, v in pairs},
    "$tuple": lambda entries, again: tuple(again(entries)),
}


def random_states() -> dict[str, Any]:
    """Return the states of the random generators of torch, Python and NumPy, for :func:`encode`."""
    found: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
    if torch.cuda.is_initialized():
        found["cuda"] = torch.cuda.get_rng_state()
    if "numpy" in sys.modules:
        found["numpy"] = sys.modules["numpy"].random.get_state()
    return found


def set_random_states(states: Mapping[str, Any]) -> None:
    """Restore what :func:`random_states` returned, also after :func:`decode`."""
    torch.set_rng_state(states["torch"])
    random.setstate(states["python"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])
    if "numpy" in states and "numpy" in sys.modules:
        sys.modules["numpy"].random.set_state(states["numpy"])
