"""Hostile command lines: outputs that cannot be written, options out of range, unreadable files."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.hostile.case import Case

OUTPUTS = {
    "a pipe": "pipe", "a folder": "folder", "no folder": "missing/plan.json",
    "a name too long": "x" * 300, "the model": "model.py", "the cluster": "cluster.yaml", "empty": "",
    "the root": "/", "a null byte": "a\0b", "under a file": "model.py/plan.json", "proc": "/proc/plan.json",
}  # fmt: skip
"""Name -> argument of -o."""

ARGUMENTS: dict[str, tuple[str, ...]] = {
    "no such model": ("plan", "none.py", "--cluster", "cluster.yaml"),
    "a folder as model": ("plan", "folder", "--cluster", "cluster.yaml"),
    "no such function": ("plan", "model.py:nothing", "--cluster", "cluster.yaml"),
    "a private function": ("plan", "model.py:__doc__", "--cluster", "cluster.yaml"),
    "no cluster": ("plan", "model.py"), "an empty cluster": ("plan", "model.py", "--cluster", ""),
    "a missing cluster": ("plan", "model.py", "--cluster", "none.yaml"),
    "a folder as cluster": ("plan", "model.py", "--cluster", "folder"),
    "the model as cluster": ("plan", "model.py", "--cluster", "model.py"),
    "no local devices": ("plan", "model.py", "--cluster", "local:0"),
    "too many local devices": ("plan", "model.py", "--cluster", "local:999999999"),
    "negative local devices": ("plan", "model.py", "--cluster", "local:-3"),
    "local text": ("plan", "model.py", "--cluster", "local:x"),
    "an engine of no name": ("plan", "model.py", "--cluster", "cluster.yaml", "--engine", "magic"),
    "a negative proof": ("plan", "model.py", "--cluster", "cluster.yaml", "--prove", "-1"),
    "a recompute of no name": ("plan", "model.py", "--cluster", "cluster.yaml", "--recompute", "all"),
    "no time": ("plan", "model.py", "--cluster", "cluster.yaml", "--time-limit", "nan"),
    "a seed out of range": ("verify", "plan.json", "--seed", "1" + "0" * 20), "a name that is no text": ("show", "\udcff.json"),
    "an unknown option": ("plan", "model.py", "--cluster", "cluster.yaml", "--fast"),
    "an unknown command": ("fly",), "a plan that is missing": ("show", "none.json"),
    "a plan that is a folder": ("show", "folder"), "a plan that is a model": ("show", "model.py"),
    "a plan of the null device": ("show", "/dev/null"), "verify of nothing": ("verify", "none.json"),
    "run of nothing": ("run", "none.json"), "run of a folder": ("run", "folder"),
    "simulate of nothing": ("simulate", "none.json"), "no ranks": ("run", "plan.json", "--nproc", "0"),
    "no steps": ("run", "plan.json", "--steps", "0"), "ranks that are text": ("run", "plan.json", "--nproc", "x"),
    "rules of no operator": ("rules", "show", "aten.none.default"), "rules of text": ("rules", "show", ""),
    "rules of punctuation": ("rules", "show", "..."), "discover nothing": ("rules", "discover", "nothing"),
    "discover a python function": ("rules", "discover", "os.system"),
    "profile without ranks": ("profile",), "profile on no ranks": ("profile", "--nproc", "0"),
    "profile on a testbed of nothing": ("profile", "--testbed", "none.yaml"),
    "profile into a folder": ("profile", "--nproc", "1", "-o", "folder"),
    "profile of other names": ("profile", "--nproc", "2", "--nodes", "a"),
    "a testbed of nothing": ("testbed",), "a testbed of a missing file": ("testbed", "none.yaml"),
    "a testbed of no cores": ("testbed", "cluster.yaml", "--cores", "-1", "--", "true"),
    "a testbed of cores that are no number": ("testbed", "cluster.yaml", "--cores", "nan", "--", "true"),
    "a testbed of links of no kind": ("testbed", "cluster.yaml", "--links", "fast", "--", "true"),
}  # fmt: skip
"""Name -> arguments."""


def cases() -> Iterator[Case]:
    """Yield every output and every argument."""
    plan = ("plan", "model.py", "--cluster", "cluster.yaml", "-o")
    for name, output in OUTPUTS.items():
        yield Case(kind="command", name=f"-o {name}", argv=(*plan, output))
    for name, argv in ARGUMENTS.items():
        yield Case(kind="command", name=name, argv=argv)
