"""A plan: program + shares + predictions, bound by digests to its model and its cluster.

A plan file is canonical JSON: the same inputs give the same bytes. It holds the captured
graph, so that a model that changed since can be told what differs.
"""

from __future__ import annotations

import difflib
import json
import os
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hap.axes import Shares
from hap.cluster import Cluster
from hap.errors import PlanError
from hap.graph import Graph
from hap.placement import S
from hap.program import Program, Value

FORMAT = 1
"""Version of the plan file; raised when an older reader would misunderstand a newer file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Where the model came from, for the commands that load it again: empty for the Python API."""

    path: str = ""
    function: str = "model"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rank:
    """Predictions for one rank. ``work`` and ``stored`` are its parts of the cluster's sums."""

    work: float
    stored: float
    compute_s: float
    wait_s: float
    peak_bytes: int
    memory_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """Communication of ``tensor``, and of the next ``fused - 1`` with it, as one operation.

    ``nbytes`` is the size of the whole tensors, ``runner_up`` the next best implementation.
    """

    tensor: str
    fused: int = 1
    kind: str
    nbytes: int
    implementation: str
    seconds: float
    runner_up: str
    runner_up_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Alternative:
    """Another way to train on the same cluster, judged by the same model."""

    name: str
    step_s: float
    fits: bool
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """A proof that nothing among ``covers`` is faster than ``step_s``, in the cost model.

    ``gap`` is the part of the plan's predicted step by which it may at most be too slow, and
    ``searches`` what the proof took.
    """

    covers: str
    step_s: float
    gap: float
    searches: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """What the cost model says of a plan. Times are seconds of one training step.

    ``bounds`` is empty in plans of older versions.
    """

    step_s: float
    communicate_s: float
    ranks: tuple[Rank, ...]
    collectives: tuple[Collective, ...]
    alternatives: tuple[Alternative, ...]
    bounds: tuple[Bound, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The pair that won, program and shares, and all that is needed to run and explain it."""

    source: Source
    graph: Graph
    cluster: Cluster
    optimizer: str
    program: Program
    shares: Shares
    idle: tuple[int, ...] = ()
    prediction: Prediction

    def __post_init__(self) -> None:
        for name, units in self.program.used_axes().items():
            given = self.shares.get(name)
            right = given is not None and sum(given) == units and min(given) >= 0
            if given is None or not right or len(given) != self.world_size:
                raise PlanError(
                    f"the shares of axis {name!r} are {given}",
                    hint=f"they must be {self.world_size} counts that sum to {units}; plan anew",
                )
        for rank in range(self.world_size):
            if self.program.used_axes() and rank not in self.idle and not self.part_of(rank):
                raise PlanError(
                    f"rank {rank} ({self.cluster.devices[rank].name}) has no share of any axis",
                    hint="take the device out of the cluster file and plan anew",
                )

    @property
    def world_size(self) -> int:
        return self.cluster.world_size

    def part_of(self, rank: int) -> int:
        """Units of all used axes that a rank holds; 0 if it only waits."""
        return sum(self.shares[name][rank] for name in self.program.used_axes())

    def local_shape(self, tensor: str, rank: int) -> tuple[int, ...]:
        """This rank's shape of an input, a parameter for example, as it is stored."""
        value = Value(tensor, self.program.inputs[tensor])
        return self.program.local_shape(self.graph, value, self.shares, rank)

    def bounds(self, value: Value, rank: int) -> tuple[int, int, int]:
        """(dim, start, stop) of a rank's shard of a sharded value, in elements."""
        sizes = self.program.sizes(self.graph, value, self.shares)
        start = sum(sizes[:rank])
        return value.placement.dim, start, start + sizes[rank]

    def local_batch(self, batch: Any, rank: int) -> Any:
        """The part of a global batch that a rank reads, in the batch's own form.

        Tensors that the program does not shard stay whole. A batch is a tensor, a tuple or a
        dict, as ``batch()`` of the model file returns it.
        """
        names = {i.target: i.tensor for i in self.graph.role("input")}

        def cut(name: str, entry: Any) -> Any:
            if name not in names:
                return entry
            value = Value(names[name], self.program.inputs[names[name]])
            expected = self.graph.tensors[value.tensor].shape
            if tuple(entry.shape) != expected:
                raise PlanError(
                    f"batch entry {name!r} has shape {tuple(entry.shape)}, the plan {expected}",
                    hint="give the global batch that the plan was made for, or plan anew",
                )
            if not value.placement.sharded:
                return entry
            dim, start, stop = self.bounds(value, rank)
            return entry.narrow(dim, start, stop - start)

        if isinstance(batch, Mapping):
            return {k: cut(str(k), v) for k, v in batch.items()}
        if isinstance(batch, tuple | list):
            return type(batch)(cut(str(k), v) for k, v in enumerate(batch))
        return cut("*", batch)

    @property
    def batch_size(self) -> int:
        """Rows of the global batch: the first dim of its first tensor."""
        return self.graph.tensors[self.graph.role("input")[0].tensor].shape[0]

    def batch_rows(self, rank: int) -> tuple[int, int]:
        """(start, stop) of the rows of the global batch that a rank reads; all if unsharded."""
        first = Value(
            self.graph.role("input")[0].tensor,
            self.program.inputs[self.graph.role("input")[0].tensor],
        )
        return self.bounds(first, rank)[1:] if first.placement == S(0) else (0, self.batch_size)

    def check_model(self, graph: Graph) -> None:
        """Raise ``PlanError`` if ``graph`` is not the graph that was planned."""
        if graph.digest == self.graph.digest:
            return
        before, now = list(self.graph.lines()), list(graph.lines())
        diff = difflib.unified_diff(before, now, n=0, lineterm="")
        changed = [line for line in diff if line[:1] in "+-" and line[:3] not in ("+++", "---")]
        first = [[x for x in changed if x.startswith(sign)][:3] for sign in "-+"]
        shown = "\n    ".join(first[0] + first[1]) or "the order of equal lines"
        rest = len(changed) - len(first[0] + first[1])
        more = f"\n    ... and {rest} more lines" if rest > 0 else ""
        raise PlanError(
            f"the model is not the one that was planned; what differs:\n    {shown}{more}",
            hint="plan anew, or go back to the model that the plan was made for",
        )

    def to_json(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "source": asdict(self.source),
            "graph_digest": self.graph.digest,
            "cluster_digest": self.cluster.digest,
            "optimizer": self.optimizer,
            "shares": {name: list(units) for name, units in self.shares.items()},
            "idle": list(self.idle),
            "prediction": asdict(self.prediction),
            "cluster": self.cluster.to_dict(),
            "program": self.program.to_json(),
            "graph": self.graph.to_json(),
        }

    def save(self, path: str | Path) -> None:
        """Write the plan file: whole, or not at all."""
        path = Path(path)
        text = json.dumps(self.to_json(), separators=(",", ":")) + "\n"
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".part")
        try:
            with os.fdopen(handle, "w") as file:
                file.write(text)
            os.chmod(temporary, 0o644)
            os.replace(temporary, path)
        except BaseException:
            os.unlink(temporary)
            raise

    @staticmethod
    def load(path: str | Path) -> Plan:
        """Read a plan file.

        Raises:
            PlanError: no such file, damaged, or written by a newer version.
        """
        where = str(path)
        try:
            data = json.loads(Path(path).read_text())
        except FileNotFoundError:
            raise PlanError("no such plan file", where=where, hint="hap plan makes one") from None
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise PlanError(
                f"the plan file is damaged or cut off ({error})", where=where, hint="plan anew"
            ) from None
        if not isinstance(data, dict) or not isinstance(data.get("format"), int):
            raise PlanError("this is no plan file", where=where, hint="hap plan makes one")
        if data["format"] > FORMAT:
            raise PlanError(
                f"the plan has format {data['format']}, this version reads up to {FORMAT}",
                where=where, hint="update hap, or plan anew with this version",
            )  # fmt: skip
        try:
            return Plan.from_json(data)
        except PlanError as error:
            raise PlanError(error.what, where=error.where or where, hint=error.hint) from None
        except (KeyError, ValueError, TypeError, IndexError) as error:
            raise PlanError(
                f"the plan file is damaged ({type(error).__name__}: {error})",
                where=where, hint="plan anew",
            ) from error  # fmt: skip

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Plan:
        """The inverse of :meth:`to_json`; raises what :meth:`load` turns into ``PlanError``."""
        graph, cluster = Graph.from_json(data["graph"]), Cluster.from_dict(data["cluster"])
        if graph.digest != data["graph_digest"] or cluster.digest != data["cluster_digest"]:
            raise PlanError("the plan's contents don't match its digests", hint="plan anew")
        p = data["prediction"]
        prediction = Prediction(
            step_s=p["step_s"],
            communicate_s=p["communicate_s"],
            ranks=tuple(Rank(**r) for r in p["ranks"]),
            collectives=tuple(Collective(**c) for c in p["collectives"]),
            alternatives=tuple(Alternative(**a) for a in p["alternatives"]),
            bounds=tuple(Bound(**b) for b in p.get("bounds", ())),
        )
        program = Program.from_json(data["program"])
        program.check(graph)
        return Plan(
            source=Source(**data["source"]),
            graph=graph,
            cluster=cluster,
            optimizer=data["optimizer"],
            program=program,
            shares={name: tuple(units) for name, units in data["shares"].items()},
            idle=tuple(data["idle"]),
            prediction=prediction,
        )
