"""The devices of this machine, by the names that a cluster file uses, for ``hap init``."""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
from dataclasses import dataclass

import torch

from hap.cluster.catalogue import find, nearest
from hap.errors import InputError

MOST_CORES = 8
"""Cores that ``hap init`` lists at most: a rank per core of a large machine takes long to plan."""

_ROOM = 0.95
"""Part of a GPU's memory that a plan may use; the rest is for the CUDA context."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """Devices of one type. ``comment`` says what to check, ``memory`` is empty for the typical one."""

    kind: str
    count: int
    memory: str = ""
    comment: str = ""


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
    """Return the GPUs by type of the catalogue, in order, given (name, bytes) of each.

    Raises:
        InputError: a GPU resembles no type of the catalogue.
    """
    found = []
    for (name, nbytes), alike in itertools.groupby(named):
        known = find(name)
        kind = known.device.kind if known else nearest(name)
        if kind is None:
            raise InputError(
                f"the GPU {name!r} resembles no known type",
                hint="write a cluster file with its memory, flops and memory_bandwidth: see "
                "docs/cluster-file.md; or measure it with hap profile",
            )
        memory = f"{int(nbytes * _ROOM) >> 20} MiB"
        comment = "" if known else f"{name} is not a known type: figures of the nearest, check them"
        found.append(Found(kind=kind, count=len([*alike]), memory=memory, comment=comment))
    return found
