"""Versions for ``hap --version``: of hap, of torch, and of the backends that ranks can use."""

from __future__ import annotations

from importlib.metadata import version

import torch
import torch.distributed as dist


def versions() -> str:
    """Return a line per part: hap, torch, gloo, CUDA and NCCL."""
    gloo = dist.is_available() and dist.is_gloo_available()
    rows = (
        ("hap", version("hap")),
        ("torch", torch.__version__),
        ("gloo", "in this torch" if gloo else "not in this torch"),
        ("cuda", _cuda()),
        ("nccl", _nccl()),
    )
    return "\n".join(f"{name:6}{text}" for name, text in rows)


def _cuda() -> str:
    if torch.version.cuda is None:
        return "not in this torch"
    count = torch.cuda.device_count()
    return f"{torch.version.cuda}, {count} device{'' if count == 1 else 's'} on this machine"


def _nccl() -> str:
    if not (dist.is_available() and dist.is_nccl_available()):
        return "not in this torch"
    return ".".join(map(str, torch.cuda.nccl.version()))
