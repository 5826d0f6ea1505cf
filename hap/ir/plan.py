"""A plan: program, shares and predictions, bound by digests to its model and cluster.

A plan file is canonical JSON: the same inputs give the same bytes. It holds the captured
graph, so that the differences to a changed model can be listed.
"""

from __future__ import annotations

import difflib
import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from hap.cluster.topology import Cluster, digest_of
from hap.errors import ClusterError, PlanError, reason_of
from hap.files import read_whole, write_whole
from hap.ir import plan_json
from hap.ir.axes import Shares
from hap.ir.batch import Form
from hap.ir.entry_types import check_entries
from hap.ir.graph import Graph
from hap.ir.local_batch import local_batch
from hap.ir.mesh import Inside, Mesh, Part, divide, offsets
from hap.ir.optimizer_kind import OptimizerKind
from hap.ir.plain_data import read_text
from hap.ir.plan_checks import check_form, check_programs, check_recipe_names
from hap.ir.prediction import (
    Alternative,
    Bound,
    Collective,
    OperatorCost,
    Prediction,
    RankPrediction,
)
from hap.ir.program import Program
from hap.ir.stages import PipelineStages, Transfer, check_one_program, cut_stages
from hap.ir.storage_levels import TensorCut, storage_levels

FORMAT = 4
"""Version of the plan file; increased when an older reader would misunderstand a newer file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Origin of the model, for commands that load it again; empty for the Python API.

    ``arguments``: those of the file, ``sys.argv`` without its name, as words of a shell.
    """

    path: str = ""
    function: str = "model"
    arguments: str = ""

    @property
    def argv(self) -> list[str]:
        """``sys.argv`` of the file."""
        return [self.path, *shlex.split(self.arguments)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """Arguments of :func:`hap.capture.tracing.capture` that reproduce the graph.

    Attributes:
        batch: the batch's form, see :mod:`hap.ir.batch`; ``None`` in plans of older versions.
        autocast: the dtype of automatic mixed precision in the forward, or nothing.
        recompute: the activations that the backward recomputes, see :mod:`hap.capture.recompute`.
        float32_matmul_precision: torch's name of the precision of float32 products; without one,
            a run leaves torch's setting alone.
        gradients: the rounding of gradients, see :mod:`hap.ir.half_gradients`; empty for none.
        training: the model was in ``train()``; plans of older versions don't say.
    """

    batch: Form = None
    autocast: str = ""
    recompute: str = ""
    float32_matmul_precision: str = ""
    gradients: str = ""
    training: bool = True

    @property
    def products(self) -> str:
        """The precision by which products of float32 tensors are priced: see :class:`Graph`."""
        return "tfloat32" if self.float32_matmul_precision in ("high", "medium") else "float32"


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The best pair of program and shares, with all that is needed to run and explain it.

    With ``inside``, the ranks form a mesh of two axes (:mod:`hap.ir.mesh`): ``program`` and
    ``shares`` are then those between machines, with an entry per machine. With ``stages``, groups of
    ranks form a pipeline (:mod:`hap.ir.stages`): ``program`` and ``shares`` are then those over time,
    with an entry per microbatch.
    """

    source: Source
    graph: Graph
    cluster: Cluster
    optimizer: OptimizerKind
    program: Program
    shares: Shares
    idle: tuple[int, ...] = ()
    left_out: tuple[str, ...] = ()
    """Names of devices of the given cluster that the plan leaves out; ``cluster`` lacks them."""
    prediction: Prediction
    inside: Inside | None = None
    stages: PipelineStages | None = None
    recipe: Recipe = Recipe()
    unruled: tuple[OperatorCost, ...] = ()
    """The operators that neither the rule table nor a user's rule describes."""
    stopped: str = ""
    """What ended the search early, such as a time limit; empty if it was finished."""

    def __post_init__(self) -> None:
        places = len(self.mesh.machines) if self.mesh else self.world_size
        if self.stages:
            places = self.microbatches
            staged = sorted(r for stage in self.stages.stages for r in stage.ranks)
            if staged != list(range(self.world_size)):
                raise PlanError(f"the stages have the ranks {staged}", hint="plan anew")
        for name, units in self.program.used_axes().items():
            given = self.shares.get(name)
            right = given is not None and sum(given) == units and min(given) >= 0
            if given is None or not right or len(given) != places:
                raise PlanError(
                    f"the shares of axis {name!r} are {given}",
                    hint=f"they must be {places} counts that sum to {units}; plan anew",
                )
        for name, given in self.inside.shares.items() if self.inside else ():
            if len(given) != self.world_size or min(given) < 0:
                raise PlanError(
                    f"the shares of axis {name!r} inside the machines are {given}",
                    hint=f"they must be {self.world_size} counts; plan anew",
                )
        for rank in range(0 if self.stages else self.world_size):
            if self.program.used_axes() and rank not in self.idle and not self.part_of(rank):
                raise PlanError(
                    f"rank {rank} ({self.cluster.devices[rank].name}) has no share of any axis",
                    hint="take the device out of the cluster file and plan anew",
                )

    @property
    def world_size(self) -> int:
        return self.cluster.world_size

    @property
    def device_names(self) -> tuple[str, ...]:
        """The names of the ranks' devices, ``node:number``."""
        return tuple(device.name for device in self.cluster.devices)

    @cached_property
    def mesh(self) -> Mesh | None:
        """The ranks as machines by devices, if the plan has two mesh axes."""
        return Mesh(self.cluster) if self.inside else None

    @property
    def microbatches(self) -> int:
        """Number of parts of the batch that the ranks run one after the other; 1 without stages."""
        return len(next(iter(self.shares.values()))) if self.stages and self.shares else 1

    def microbatch(self, number: int = 0) -> Graph:
        """Return the step of one microbatch, of a plan with stages."""
        return divide(self.graph, self.program, self.shares, number)

    @cached_property
    def cut(self) -> tuple[tuple[Graph, ...], tuple[Transfer, ...]]:
        """The graph of each stage for the first microbatch, and the transfers between them."""
        assert self.stages is not None
        return cut_stages(self.microbatch(), self.stages.cuts)

    @cached_property
    def owners(self) -> Mapping[str, int]:
        """Parameter -> the stage that stores it, of a plan with stages."""
        return {i.tensor: k for k, g in enumerate(self.cut[0]) for i in g.role("parameter")}

    @property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """The groups of ranks of the first level of :meth:`levels`: machines, stages, or all ranks."""
        if self.stages:
            return tuple(stage.ranks for stage in self.stages.stages)
        return self.mesh.machines if self.mesh else (tuple(range(self.world_size)),)

    @cached_property
    def whole(self) -> tuple[Graph, Program]:
        """All instructions that ranks run, and their graph.

        Raises:
            PlanError: the ranks of different stages run different programs.
        """
        check_one_program(self.stages)
        if self.inside is None:
            return self.graph, self.program
        return divide(self.graph, self.program, self.shares), self.inside.program

    def part(self, rank: int) -> Part:
        """Return the program of a rank, with the sizes of its own machine.

        Raises:
            PlanError: as :attr:`whole`.
        """
        check_one_program(self.stages)
        if self.mesh is None:
            return Part(self.graph, self.program, self.shares, rank, {})
        machine, column = self.mesh.place(rank)
        return self._machines[machine]._replace(rank=column)

    @cached_property
    def _machines(self) -> list[Part]:
        """The parts of the first rank of each machine."""
        assert self.mesh is not None
        assert self.inside is not None
        found = []
        for machine, ranks in enumerate(self.mesh.machines):
            shares = {
                name: tuple(units[r] for r in ranks) for name, units in self.inside.shares.items()
            }
            axes = {
                dim: (name, sum(shares[name]))
                for dim, (name, _) in self.inside.program.axes.items()
            }
            graph = divide(self.graph, self.program, self.shares, machine)
            begin = offsets(self.graph, self.program, self.shares, machine, graph)
            found.append(Part(graph, replace(self.inside.program, axes=axes), shares, 0, begin))
        return found

    def part_of(self, rank: int) -> int:
        """Return the units of all used axes that a rank holds; 0 if it only waits."""
        held = sum(self.shares[name][self.place(rank)] for name in self.program.used_axes())
        return held + sum(u[rank] for u in self.inside.shares.values()) if self.inside else held

    def place(self, rank: int) -> int:
        return self.mesh.place(rank)[0] if self.mesh else rank

    def levels(self, tensor: str, rank: int) -> tuple[TensorCut | None, ...]:
        """Return the cuts of an input in storage, the coarsest first; ``None``: not cut.

        There is one level, or with two mesh axes a cut between machines and one inside, or with
        stages a cut that gives all of it to one stage and one inside.
        """
        return storage_levels(self, tensor, rank)

    def copies(self, tensor: str, rank: int) -> int:
        """Return the number of ranks, this one included, that hold a rank's elements of an input."""
        levels, copies = self.levels(tensor, rank), self.world_size
        if self.stages and levels[0]:
            levels, copies = levels[1:], len(self.groups[self.stages.place(rank)[0]])
        for level in levels:
            copies //= len(level.sizes) if level else 1
        return copies

    def local_shape(self, tensor: str, rank: int) -> tuple[int, ...]:
        """Return this rank's shape of a stored input, such as a parameter."""
        shape = list(self.graph.tensors[tensor].shape)
        for level in self.levels(tensor, rank):
            if level:
                shape[level.dim] = level.sizes[level.place]
        return tuple(shape)

    def local_batch(self, batch: Any, rank: int) -> Any:
        """Return the part of a global batch that a rank reads, in the batch's own form.

        Tensors that the program does not shard stay whole; see :mod:`hap.ir.batch` for the forms of a
        batch.
        """
        return local_batch(self, batch, rank)

    @property
    def batch_size(self) -> int:
        """Number of rows of the global batch: the first dim of its first tensor with dims."""
        return self.graph.tensors[self._first_input].shape[0]

    @property
    def _first_input(self) -> str:
        names = [i.tensor for i in self.graph.role("input")]
        return next((name for name in names if self.graph.tensors[name].shape), names[0])

    def batch_rows(self, rank: int) -> tuple[int, int]:
        """Return (start, stop) of the rows that a rank reads; all rows if unsharded."""
        start, stop = 0, self.batch_size
        for level in self.levels(self._first_input, rank):
            if level and level.dim == 0:
                start += level.start
                stop = start + level.sizes[level.place]
        return start, stop

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
        """Return plain data without default values, which older plans lack as well."""
        data: dict[str, Any] = {
            "format": FORMAT,
            "source": plan_json.packed(self.source),
            "graph_digest": self.graph.digest,
            "cluster_digest": self.cluster.digest,
            "optimizer": plan_json.packed(self.optimizer),
            "shares": {name: list(units) for name, units in self.shares.items()},
            "prediction": plan_json.packed(self.prediction),
            "cluster": self.cluster.to_dict(),
            "program": self.program.to_json(),
            "graph": self.graph.to_json(),
        }
        optional = {
            "idle": list(self.idle),
            "left_out": list(self.left_out),
            "recipe": plan_json.packed(self.recipe),
            "unruled": plan_json.packed(self.unruled),
            "stopped": self.stopped,
            "inside": plan_json.pack_inside(self.inside) if self.inside else None,
            "stages": plan_json.pack_stages(self.stages) if self.stages else None,
        }
        return data | {key: value for key, value in optional.items() if value}

    def save(self, path: str | Path) -> None:
        """Write the plan file atomically."""
        text = json.dumps(self.to_json(), separators=(",", ":"), allow_nan=False) + "\n"
        write_whole(path, [text])

    @staticmethod
    def load(path: str | Path) -> Plan:
        """Read a plan file.

        Raises:
            PlanError: no such file, damaged, or written by a newer version.
        """
        where = str(path)
        infinite: list[str] = []
        try:
            data = json.loads(
                read_whole(path),
                parse_constant=plan_json.noted(infinite),
                parse_float=plan_json.finite,
            )
        except FileNotFoundError:
            raise PlanError("no such plan file", where=where, hint="hap plan makes one") from None
        except OSError as error:
            reason = reason_of(error)
            raise PlanError(
                f"the plan file cannot be read: {reason}", where=where, hint="give a plan file"
            ) from None
        except RecursionError:
            raise PlanError(
                "the plan file is nested too deep", where=where, hint="plan anew"
            ) from None
        except ValueError as error:
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
        if (
            infinite and data["format"] >= 4
        ):  # older plans wrote a device's default rate as Infinity
            raise PlanError(f"{infinite[0]} is no finite number", where=where, hint="plan anew")
        try:
            return Plan.from_json(data)
        except (PlanError, ClusterError) as error:
            raise PlanError(
                error.what, where=error.where or where, hint=error.hint or "plan anew"
            ) from None
        except (LookupError, ValueError, TypeError, AttributeError, OverflowError) as error:
            raise PlanError(
                f"the plan file is damaged ({type(error).__name__}: {error})",
                where=where, hint="plan anew",
            ) from error  # fmt: skip

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Plan:
        """Inverse of :meth:`to_json`; :meth:`load` turns its errors into ``PlanError``."""
        graph, cluster = Graph.from_json(data["graph"]), Cluster.from_dict(data["cluster"])
        # Digest the stored data: a newer version may have added defaults to the cluster.
        digests = graph.digest, digest_of(data["cluster"])
        if digests != (data["graph_digest"], data["cluster_digest"]):
            raise PlanError("the plan's contents don't match its digests", hint="plan anew")
        p, optimizer = data["prediction"], OptimizerKind.from_json(data["optimizer"])
        recipe = plan_json.unpacked(Recipe, data.get("recipe", {}), "the recipe")
        check_recipe_names(recipe.float32_matmul_precision, recipe.gradients)
        check_form(recipe.batch, graph)
        prediction = Prediction(
            step_s=p["step_s"],
            communicate_s=p["communicate_s"],
            hidden_s=p.get("hidden_s", 0.0),
            ranks=tuple(RankPrediction(**r) for r in p["ranks"]),
            collectives=tuple(Collective(**c) for c in p["collectives"]),
            alternatives=tuple(Alternative(**a) for a in p["alternatives"]),
            bounds=tuple(Bound(**b) for b in p.get("bounds", ())),
        )
        plan = Plan(
            source=plan_json.unpacked(Source, data["source"], "the source"),
            graph=replace(
                graph,
                products=recipe.products,
                whole_parameters=optimizer.whole_parameters,
                fused_update=optimizer.fused,
            ),
            cluster=cluster,
            optimizer=optimizer,
            program=Program.from_json(data["program"]),
            shares=plan_json.read_shares(data["shares"]),
            idle=tuple(data.get("idle", ())),
            left_out=tuple(data.get("left_out", ())),
            prediction=prediction,
            recipe=recipe,
            unruled=tuple(OperatorCost(**o) for o in data.get("unruled", ())),
            inside=plan_json.unpack_inside(data["inside"]) if "inside" in data else None,
            stages=plan_json.unpack_stages(data["stages"]) if "stages" in data else None,
            stopped=read_text(data.get("stopped", ""), "`stopped`"),
        )
        check_entries(graph, cluster, prediction)
        check_programs(plan.graph, plan.program, plan.shares, plan.inside, plan.stages, cluster)
        return plan
