"""Keep plans on disk, by everything that they depend on.

Planning is deterministic, so a kept plan is the one that planning again would make.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from functools import cache
from importlib.metadata import version
from pathlib import Path

import torch

from hap.cluster.topology import Cluster
from hap.errors import HapError
from hap.files import cache_folder
from hap.ir.graph import Graph
from hap.ir.optimizer_kind import OptimizerKind
from hap.ir.plan import Plan, Recipe
from hap.synthesizer.plan_options import PlanOptions

MOST = 200
"""Plans that are kept; the oldest are removed."""

_CODE = ("api.py", "capture", "cluster", "gradient_roundings.py", "ir", "synthesizer")
"""Files and folders whose code decides a plan: a change of one of their files makes all kept plans unknown."""


class PlanCache:
    """Plans of earlier calls, in ``$XDG_CACHE_HOME/hap/plans``, by default in ``~/.cache``.

    Args:
        progress: called if a plan cannot be kept or read, with the reason.

    Attributes:
        found: plans that were read so far.
    """

    def __init__(self, progress: Callable[[str], None] = lambda text: None) -> None:
        self.folder, self.found = cache_folder() / "plans", 0
        self._progress = progress

    def key(
        self, graph: Graph, cluster: Cluster, kind: OptimizerKind, recipe: Recipe,
        options: PlanOptions,
    ) -> str:  # fmt: skip
        """Return the name of the plan of these inputs."""
        rules = sorted((name, list(lines)) for name, lines in graph.rules.items())
        parts = [
            graph.digest, rules, cluster.to_dict(), str(kind), repr(recipe), repr(options),
            torch.__version__, version("ortools"), _code(),
        ]  # fmt: skip
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()

    def get(self, key: str) -> Plan | None:
        """Return the plan of a key, if it is there and readable."""
        file = self.folder / f"{key}.json"
        try:
            if not file.exists():
                return None
            plan = Plan.load(file)
        except (HapError, OSError) as error:
            self._progress(f"a cached plan is damaged, planning again: {error}")
            return None
        self.found += 1
        return plan

    def put(self, key: str, plan: Plan) -> None:
        """Keep a plan, unless its search was stopped early."""
        if plan.stopped:
            return
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            plan.save(self.folder / f"{key}.json")
            kept = sorted(self.folder.glob("*.json"), key=lambda file: file.stat().st_mtime)
            for file in kept[:-MOST]:
                file.unlink(missing_ok=True)
        except OSError as error:
            self._progress(f"the plan cannot be cached: {error}")


@cache
def _code() -> str:
    """Return the SHA-256 (hex) of the code that decides a plan."""
    digest, here = hashlib.sha256(), Path(__file__).parent
    for path in (here / name for name in _CODE):
        for file in [path] if path.is_file() else sorted(path.rglob("*")):
            if file.suffix in (".py", ".yaml"):
                digest.update(file.read_bytes())
    return digest.hexdigest()
