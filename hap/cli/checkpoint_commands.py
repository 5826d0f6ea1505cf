"""``hap run --checkpoint``, ``hap export`` and ``hap import``."""

from __future__ import annotations

from pathlib import Path

from hap.errors import InputError
from hap.runtime.checkpoints.checkpoint_resume import Checkpoints
from hap.runtime.checkpoints.checkpoint_weights import export, import_

__all__ = ["checkpoints", "export_weights", "import_weights"]


def checkpoints(folder: str | None, every: int, keep: int, resume: str) -> Checkpoints | None:
    """Return the checkpoints of a run, or nothing without a folder.

    Raises:
        InputError: there is nothing to resume from, or checkpoints would be overwritten.
    """
    if folder is None:
        if resume != "no":
            raise InputError("--resume without --checkpoint", hint="give --checkpoint DIR as well")
        return None
    if not folder:
        raise InputError("--checkpoint names no folder", hint="give --checkpoint DIR")
    found = Checkpoints(folder=str(Path(folder).absolute()), every=every, keep=keep, resume=resume)
    found.check()
    return found


def export_weights(checkpoint: str, to: str) -> str:
    """Export the newest checkpoint; returns what to print."""
    step, names, files = export(checkpoint, to)
    return f"step {step}: {names} tensors in {files} file{'s' if files > 1 else ''}, in {to}"


def import_weights(weights: str, to: str) -> str:
    """Import weights; returns what to print."""
    names = import_(weights, to)
    return f"{names} tensors in {to}/step-0; hap run PLAN --checkpoint {to} --resume auto"
