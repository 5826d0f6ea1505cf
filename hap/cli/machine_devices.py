"""The devices of this machine, by the names that a cluster file uses, for ``hap init``."""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
from dataclasses import dataclass

import torch

from hap.cluster.catalogue import find, nearest
from hap.cluster.device import USABLE_MEMORY
from hap.errors import InputError

MOST_CORES = 8
"""Cores that ``hap init`` lists at most: a rank per core of a large machine takes long to plan."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """Devices of one type.

    Attributes:
        kind: the type's name in the catalogue, or the driver's name of an unknown GPU.
        count: the number of devices.
        memory: as the file has it; empty for the typical one.
        comment: what to check, or to complete, in the entry.
        unknown: the catalogue has no such type, and the entry lacks figures.
    """

    kind: str
    count: int
    memory: str = ""
    comment: str = ""
    unknown: bool = False


def devices() -> tuple[str, list[Found]]:
    """Return where the devices were found, and the GPUs or, if there are none, the cores."""
    if torch.cuda.is_available():
        all_of = [torch.cuda.get_device_properties(k) for k in range(torch.cuda.device_count())]
        return "torch.cuda", gpus([(p.name, p.total_memory) for p in all_of])
    if shutil.which("nvidia-smi"):
        query = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]
        said = subprocess.run(query, capture_output=True, text=True)
        if said.returncode == 0 and said.stdout.strip():
            return "nvidia-smi; this torch cannot use the GPUs", gpus(listed(said.stdout))
    cores = min(len(os.sched_getaffinity(0)), MOST_CORES)
    return "counting cores, as there is no GPU", [Found(kind="cpu", count=cores)]


def listed(text: str) -> list[tuple[str, int]]:
    """Return (name, bytes) of each line of nvidia-smi: ``NVIDIA H200, 143771`` in MiB."""
    lines = [line.rpartition(",") for line in text.splitlines() if line.strip()]
    wrong = next((line for line in lines if not line[2].strip().isdecimal()), None)
    if wrong:
        raise InputError(
            f"nvidia-smi lists a GPU without its memory: {''.join(wrong)!r}",
            hint="write the cluster file by hand: see docs/cluster-file.md",
        )
    return [(name.strip(), int(mib) << 20) for name, _, mib in lines]


def gpus(named: list[tuple[str, int]]) -> list[Found]:
    """Return the GPUs by type, in order, given (name, bytes) of each."""
    return [
        _found(name, len([*alike]), f"{int(nbytes * USABLE_MEMORY) >> 20} MiB")
        for (name, nbytes), alike in itertools.groupby(named)
    ]


def _found(name: str, count: int, memory: str) -> Found:
    if known := find(name):
        return Found(kind=known.device.kind, count=count, memory=memory)
    if near := nearest(name):
        doubt = f"{name} is not in the catalogue: the figures are those of {near}, check them"
        return Found(kind=near, count=count, memory=memory, comment=doubt)
    missing = (
        f"{name} is not in the catalogue: add its flops: {{float32: ..., bfloat16: ...}} and "
        "memory_bandwidth to this entry, or measure them: hap profile -o FILE --nproc N"
    )
    return Found(kind=name, count=count, memory=memory, comment=missing, unknown=True)
