"""The commands that a user types on a machine with GPUs: plan, verify, run, resume, trainers."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from benchmarks.gpu_proof.report import MET, MISSED, SKIPPED, Line
from benchmarks.gpu_proof.settings import Settings
from hap.cluster.cluster_file import load_cluster

PART = "commands"
FOUR = """
links: {between: 10 Gbit/s}
nodes:
  - {name: new, gpus: 2, type: A100-40}
  - {name: old, gpus: 2, type: P100}
"""
"""A cluster whose ranks share this machine's GPUs, to verify an uneven plan."""
ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
PATHS = (ROOT, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)))
ON_CPU = 3
"""Number of the commands that a CPU runs."""
COMMANDS = (
    "hap init lab --force",
    "hap plan lab/model.py --cluster lab/cluster.yaml --all-devices -o one.json",
    "hap verify one.json --device {device}",
    "hap run one.json --steps 4 --checkpoint saved --every 2",
    "hap run one.json --steps 6 --checkpoint saved --resume auto",
    "hap run one.json --steps 3 --backend inductor",
    "hap run one.json --steps 3 --backend cudagraphs",
    "hap verify one.json --processes --device {device} --backend cudagraphs",
    "hap plan lab/model.py --cluster four.yaml --all-devices -o four.json",
    "hap verify four.json --processes --device {device}",
    "hap verify four.json --processes --device {device} --dtype float32",
    "hap verify four.json --processes --device {device} --backend cudagraphs",
    "hap plan {examples}/gpt2.py --cluster lab/cluster.yaml --all-devices -o gpt2.json",
    "torchrun --nproc-per-node={ranks} {examples}/plain_loop.py gpt2.json --checkpoint loop",
    "torchrun --nproc-per-node={ranks} {examples}/plain_loop.py gpt2.json --checkpoint loop --steps 10",
    "hap plan {examples}/gpt2.py:trainer --cluster lab/cluster.yaml --all-devices -o trainer.json",
    "torchrun --nproc-per-node={ranks} {examples}/hf_trainer.py trainer.json --output_dir out"
    " --per_device_train_batch_size {rows} --dataloader_drop_last --max_steps 4 --report_to none",
)


def run(settings: Settings) -> Iterator[Line]:
    """Yield one line per command; later ones read the files of earlier ones."""
    folder = (settings.folder / "commands").absolute()
    folder.mkdir(exist_ok=True)
    (folder / "four.yaml").write_text(FOUR)
    yield _typed(COMMANDS[0].split(), folder, settings.timeout_s)
    ranks = load_cluster(folder / "lab" / "cluster.yaml").world_size
    for words in COMMANDS[1 : None if settings.on_gpu else ON_CPU]:
        words = words.format(
            device=settings.device.type, examples=EXAMPLES, ranks=ranks, rows=16 // ranks
        )
        yield _typed(words.split(), folder, settings.timeout_s)
    if not settings.on_gpu:
        reason = "the tests run the other commands on CPUs"
        yield Line(part=PART, claim="all commands", outcome=SKIPPED, reason=reason)


def _typed(words: list[str], folder: Path, timeout_s: float) -> Line:
    module = {"hap": "hap.cli", "torchrun": "torch.distributed.run"}[words[0]]
    done = subprocess.run(
        [sys.executable, "-m", module, *words[1:]], cwd=folder, capture_output=True, text=True,
        timeout=timeout_s, env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, PATHS))},
    )  # fmt: skip
    claim = " ".join(Path(word).name if word.startswith("/") else word for word in words)
    if done.returncode:
        told = (done.stdout[-1000:] + done.stderr[-2000:]).strip()
        return Line(
            part=PART, claim=claim, outcome=MISSED, reason=f"exit {done.returncode}: {told}"
        )
    last = next((line for line in reversed(done.stdout.splitlines()) if line.strip()), "")
    return Line(part=PART, claim=claim, outcome=MET, seen=" ".join(last.split()))
