"""Hostile arguments and files of the commands that read a plan, weights, a log or checkpoints."""

from __future__ import annotations

import io
import json
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.hostile.case import CLUSTER, Case

UNREADABLE = {
    "missing": "none.json", "a folder": "folder", "a pipe": "pipe", "zeros": "/dev/zero", "a null byte": "a\0b",
    "a long name": "x" * 5000, "no name": "",
}  # fmt: skip
"""Name -> path of a file to read."""

UNWRITABLE = {
    "a folder": "folder", "a pipe": "pipe", "the plan": "plan.json", "the model": "model.py", "no name": "",
    "no folder": "missing/file", "a null byte": "a\0b",
}  # fmt: skip
"""Name -> path of a file to write."""

LOGS: dict[str, str | bytes] = {
    "text": "hello\n", "bytes": bytes(range(256)), "a number": "3\n", "a list": "[]\n", "NaN": '{"step": NaN}\n',
    "wrong types": '{"step": "a", "loss": [], "seconds": {}}\n', "half a line": '{"step": 1, "lo', "deep": "[" * 100_000,
}  # fmt: skip

QUESTIONS: dict[str, tuple[str, ...]] = {
    "no rows": ("--rows", "0"), "negative rows": ("--rows", "-4"), "text as rows": ("--rows", "a,b"),
    "10**30 rows": ("--rows", "1" + "0" * 30), "half a row": ("--rows", "1.5"), "a square as rows": ("--rows", "²"),
    "a link of text": ("--link", "fast"), "a link of nothing": ("--link", "0 Gbit/s"), "a link of kg": ("--link", "10 kg"),
    "no number of devices": ("--add", "xA100"), "no devices": ("--add", "0xA100"), "an unknown device": ("--add", "2xZ999"),
    "too many devices": ("--add", "99999999999xA100"), "without nobody": ("--without", "nobody"), "a plot of text": ("--plot", "x.txt"),
    "a plot in a folder": ("--plot", "folder"), "a plot on the model": ("--plot", "model.py"), "an order of no name": ("--by", "price"),
}  # fmt: skip
"""Name -> options of ``what-if``."""

PINS = {
    "no placement": "x", "no name": "=R", "an empty one": "up.weight=", "a dim that is absent": "up.weight=S9", "nothing": "nothing=R",
    "a negative dim": "up.weight=S-1", "a huge dim": "up.weight=S" + "9" * 30, "a partial sum": "up.weight=P",
}  # fmt: skip

RUNS: dict[str, tuple[str, ...]] = {
    "resume alone": ("--resume", "auto"), "resume from nothing": ("--checkpoint", "ck", "--resume", "ck/step-9"),
    "resume from text": ("--checkpoint", "ck", "--resume", "maybe"), "elastic alone": ("--elastic",),
    "elastic without resume": ("--elastic", "--checkpoint", "ck"), "adapt alone": ("--adapt",),
    "restarts without checkpoints": ("--max-restarts", "2"), "negative restarts": ("--max-restarts", "-1"),
    "every 0 steps": ("--checkpoint", "ck", "--every", "0"), "keep none": ("--checkpoint", "ck", "--keep", "0"),
    "checkpoints in a file": ("--checkpoint", "model.py"), "checkpoints under a file": ("--checkpoint", "model.py/x"),
    "checkpoints in proc": ("--checkpoint", "/proc/absent/x"), "checkpoints nowhere": ("--checkpoint", ""), "more ranks than devices": ("--nproc", "99"), "a backend of no name": ("--backend", "magic"),
}  # fmt: skip
"""Name -> options of ``run``."""

HOSTFILES = {
    "no slots": "a slots=0\n", "text as slots": "a slots=x\n", "negative slots": "a slots=-1\n", "too many slots": "a slots=999999999999\n",
    "a billion slots": "a slots=1000000000 type=V100\n", "5000 digits of slots": f"a slots={'9' * 5000} type=V100\n",
    "a remark alone": "# hi\n", "a long name": "a" * 100_000 + " slots=2\n",
}  # fmt: skip

SPECS = {
    "two colons": "model.py:model:model", "a trailing colon": "model.py:", "a builtin": "model.py:__import__", "the batch": "model.py:batch",
    "the loss": "model.py:loss", "a module": "model.py:torch", "dots": "model.py:a.b", "an address": "http://x/model.py",
}  # fmt: skip
"""Name -> the model's argument."""


def cases(plan: Path) -> Iterator[Case]:
    """Yield hostile arguments and files beside a plan file that is right."""
    data = json.loads(plan.read_text())
    data["source"]["path"] = "model.py"
    text = json.dumps(data)

    def case(name: str, *argv: str, exits: tuple[int, ...] = (2,), **files: str | bytes) -> Case:
        named = {key.replace("__", "."): value for key, value in files.items()}
        return Case(
            kind="command", name=name, argv=argv, files={"plan.json": text, **named}, exits=exits
        )

    for name, path in UNREADABLE.items():
        for command in ("explain", "show", "report", "verify", "simulate"):
            yield case(f"{command} a plan: {name}", command, path)
        yield case(f"a model: {name}", "plan", path, "--cluster", "cluster.yaml")
        yield case(f"a cluster: {name}", "plan", "model.py", "--cluster", path)
        yield case(f"a log: {name}", "report", "plan.json", "-o", "x.html", "--log", path)
        yield case(f"weights: {name}", "import", path, "--to", "out")
        yield case(f"checkpoints: {name}", "export", path, "--to", "out")
        moved = json.dumps({**data, "source": {"path": path, "function": "model"}})
        yield case(f"a plan's model file: {name}", "verify", "p.json", p__json=moved)
    for name, path in UNWRITABLE.items():
        yield case(f"report -o {name}", "report", "plan.json", "-o", path)
        yield case(f"a trace: {name}", "simulate", "plan.json", "--trace", path)
        if path:
            yield case(f"run --log {name}", "run", "plan.json", "--nproc", "4", "--log", path)
    for name, log in LOGS.items():
        argv = ("report", "plan.json", "-o", "x.html", "--log", "log")
        yield case(f"a log of {name}", *argv, log=log)
    for name, options in QUESTIONS.items():
        yield case(f"what if: {name}", "what-if", "model.py", "--cluster", "cluster.yaml", *options)
    for name, pin in PINS.items():
        argv = ("plan", "model.py", "--cluster", "cluster.yaml", "--pin", pin)
        yield case(f"a pin of {name}", *argv)
    for name, options in RUNS.items():
        yield case(f"run: {name}", "run", "plan.json", "--nproc", "4", *options)
    for name, hosts in HOSTFILES.items():
        argv = ("plan", "model.py", "--cluster", "hosts")
        yield case(f"a hostfile with {name}", *argv, hosts=hosts)
    for name, spec in SPECS.items():
        yield case(f"a model that is {name}", "plan", spec, "--cluster", "cluster.yaml")
    for name, asked in {"nothing": "", "an unknown one": "x", "a rank": "99"}.items():
        yield case(f"explain {name}", "explain", "plan.json", asked)
    yield case("figures of no rank", "show", "plan.json", "--json", "--rank", "99")
    for name, folder in {"a file": "model.py", "under a file": "model.py/x"}.items():
        yield case(f"init in {name}", "init", folder)
    yield from _weights(case)


class _Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("exit 1",)


def _weights(case: Any) -> Iterator[Case]:
    """Yield files that are no weights: of ``torch.save``, and safetensors."""

    def saved(value: Any) -> bytes:
        held = io.BytesIO()
        torch.save(value, held)
        return held.getvalue()

    zeros = torch.zeros(2)
    for name, content in {
        "nothing": b"", "text": b"hello", "code": saved({"a": _Evil()}), "a list": saved([zeros]), "a tensor": saved(zeros),
        "numbers": saved({"a": 3}), "keys that are no text": saved({1: zeros}), "sparse tensors": saved({"a": torch.eye(3).to_sparse()}),
        "tensors without data": saved({"a": torch.zeros(2, device="meta")}), "half a file": saved({"a": zeros})[:200],
        "a pickle of nothing": b"\x80\x02.", "a pickle of half a float": b"\x80\x02G.",
    }.items():  # fmt: skip
        yield case(
            f"import of {name}", "import", "w__pt".replace("__", "."), "--to", "out", w__pt=content
        )

    def tensors(header: Any, body: bytes = b"") -> bytes:
        text = header if isinstance(header, bytes) else json.dumps(header).encode()
        return struct.pack("<Q", len(text)) + text + body

    for name, content in {
        "a short file": b"\1", "a huge header": struct.pack("<Q", 2**60) + b"{}", "a header of text": tensors(b"hello"), "a list": tensors([]),
        "offsets beyond the end": tensors({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 99]}}, b"\0" * 8),
        "an unknown dtype": tensors({"a": {"dtype": "X9", "shape": [2], "data_offsets": [0, 8]}}, b"\0" * 8), "no tensors": tensors({}),
    }.items():  # fmt: skip
        yield case(
            f"import of safetensors: {name}",
            "import",
            "w.safetensors",
            "--to",
            "out",
            w__safetensors=content,
        )
    for name, index in {
        "text": "hello",
        "an empty object": "{}",
        "a list": "[]",
        "deep": "[" * 100_000,
    }.items():
        yield Case(
            kind="command", name=f"export of an index: {name}", argv=("export", "ck", "--to", "out"),
            files={"ck/step-1/checkpoint.json": index, "cluster.yaml": CLUSTER},
        )  # fmt: skip
