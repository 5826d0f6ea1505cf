"""Plans for the parts of a cluster that are left after a loss.

    python -m hap.part_plans PLAN FOLDER [ARGUMENT]...

makes those for the loss of each machine and of each device. The arguments are ``sys.argv`` of the
model file.

Each is planned once per plan of the whole cluster, and kept in a folder beside the run's checkpoints.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from hap.api import plan_again
from hap.cluster.topology import Cluster
from hap.errors import HapError
from hap.ir.plan import Plan
from hap.synthesizer.plan_options import PlanOptions


class PartPlans:
    """The plan of a whole cluster, and those of its parts.

    Args:
        whole: where the plan for all devices is.
        folder: where the others are kept; it is made.
    """

    def __init__(self, whole: str | Path, folder: str | Path) -> None:
        self.path, self.whole = Path(whole), Plan.load(whole)
        # The optimizer, the recipe and the options decide what a part can hold: all are in the file.
        self._digest = hashlib.sha256(self.path.read_bytes()).hexdigest()
        self._folder = Path(folder)

    def file(self, names: Sequence[str]) -> Path:
        """Return the plan file for some devices, which is planned now unless it is there.

        Args:
            names: devices of the whole plan.

        Raises:
            InfeasibleError: they have too little memory.
        """
        part, path = self._part(names)
        if not path.exists():
            self._folder.mkdir(parents=True, exist_ok=True)
            options = PlanOptions(allow_idle=True, stages=self.whole.stages is not None)
            plan_again(self.whole, part, options).save(path)
        return path

    def has(self, names: Sequence[str]) -> bool:
        """Is the plan for these devices there?"""
        return self._part(names)[1].exists()

    def _part(self, names: Sequence[str]) -> tuple[Cluster, Path]:
        """Return the cluster of some devices, and where its plan is kept."""
        cluster = self.whole.cluster
        if len(names) == cluster.world_size:
            return cluster, self.path
        part = cluster.keep([r for r, d in enumerate(cluster.devices) if d.name in names])
        name = hashlib.sha256(f"{part.digest} {self._digest}".encode()).hexdigest()[:16]
        return part, self._folder / f"{name}.json"

    def likely(self) -> Iterator[tuple[str, ...]]:
        """Yield the devices that are left after the loss of each machine, then of each device."""
        cluster = self.whole.cluster
        lost = [cluster.ranks(node) for node in cluster.nodes]
        lost += [(r,) for r in range(cluster.world_size) if (r,) not in lost]
        for ranks in lost:
            if len(ranks) < cluster.world_size:
                yield tuple(d.name for r, d in enumerate(cluster.devices) if r not in ranks)


def main(whole: str, folder: str, *extra: str) -> None:
    """Make the plans for likely losses; those whose devices have too little memory are named."""
    plans = PartPlans(whole, folder)
    source = plans.whole.source
    sys.argv = [source.path, *extra] if extra else source.argv
    for names in plans.likely():
        try:
            plans.file(names)
        except HapError as error:
            print(f"no plan for {', '.join(names)} alone: {error}", file=sys.stderr)


if __name__ == "__main__":
    main(*sys.argv[1:])
