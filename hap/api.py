"""The face of the packages: plan, compile, verify, train."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict, TypeVar, Unpack

import torch
import torch.distributed as dist
from torch import nn

from hap.capture import torch_private
from hap.capture.model_file import ModelFile, load_model_file, model_file_of
from hap.capture.recompute import WAYS
from hap.capture.tracing import Loss, capture
from hap.capture.user_optimizer import MakeOptimizer, default_optimizer, examine, make_optimizer
from hap.cluster.cluster_file import load_cluster
from hap.cluster.topology import Cluster
from hap.errors import InfeasibleError, InputError, ModelError, TooEntangledError
from hap.gc_pause import no_collector
from hap.ir.axes import Shares
from hap.ir.batch import Batch, call, flatten, form_of, rebuild
from hap.ir.graph import Graph
from hap.ir.mesh import Inside
from hap.ir.plan import Plan, Recipe, Source
from hap.ir.program import Program
from hap.rule_discovery import with_rules
from hap.runtime.collectives import Comm, LocalComm, ProcessGroupComm
from hap.runtime.hap_module import GradScaler, HapModule, clip_grad_norm_, emit
from hap.runtime.launch import init_from_env, rank_device, spawn
from hap.runtime.shared_gpu import SharedGpus
from hap.runtime.verify import Observed, Observer, Verdict
from hap.runtime.verify import verify as verify_plan
from hap.synthesizer.planner import PlannedPair, Wishes, choose
from hap.synthesizer.search.program_space import NARROW, build_space

__all__ = [
    "GradScaler",
    "clip_grad_norm_",
    "code",
    "compile",
    "model_file_of",
    "plan",
    "plan_file",
    "train",
    "verify",
]

Progress = Callable[[str], None]
Made = TypeVar("Made")


class Options(TypedDict, total=False):
    """What :func:`plan` may be told beside the model and the cluster; it says what each means."""

    recompute: str | None
    allow_idle: bool
    all_devices: bool
    mesh: bool | None
    compare: bool
    engine: str
    prove: int
    discover: bool


@no_collector()
def plan(
    model: nn.Module | Callable[[], nn.Module],
    batch: Batch,
    cluster: Cluster | str | Path,
    *,
    loss: Loss | None = None,
    optimizer: MakeOptimizer = default_optimizer,
    autocast: str = "",
    recompute: str | None = None,
    allow_idle: bool = False,
    prove: int = 0,
    all_devices: bool = False,
    mesh: bool | None = None,
    compare: bool = False,
    engine: str = "exact",
    rules: Mapping[str, Sequence[str]] | None = None,
    discover: bool = False,
    source: Source | None = None,
    progress: Progress = lambda text: None,
) -> Plan:
    """The fastest program found for one training step of ``model`` on ``cluster``.

    Pure: needs no process group and allocates no weights.

    Args:
        model: the module, real or built under fake tensors, or a function that makes it.
        batch: the *global* batch: a tensor, a tuple, or a dict by keyword.
        cluster: a cluster, or what :func:`hap.load_cluster` reads.
        loss: ``loss(output, batch)``, if the module's output is no loss.
        optimizer: makes the optimizer, whose states take memory; see
            :data:`hap.capture.user_optimizer.MakeOptimizer`.
        autocast: ``bfloat16`` or ``float16``: the forward and the loss run in automatic mixed
            precision.
        recompute: which activations the backward makes again in place of keeping them, of
            :data:`hap.capture.recompute.WAYS`, or none (``""``); default: none, unless no program
            fits in memory without.
        allow_idle: accept a batch smaller than the number of devices.
        all_devices: leave no device out, even if the others are predicted to be faster alone.
        mesh: plan over two axes, between machines and inside them (True), over one (False), or
            both ways where the cluster allows it, to take the better one (None).
        engine: what searches for programs, a name in :data:`hap.synthesizer.search.engines.ENGINES`.
        compare: plan every baseline beside it, not just the usual ones.
        prove: searches to spend on a better lower bound of the step; the plan stays the same.
        rules: of operators that the table lacks, as lines: see docs/rules.md.
        discover: find the rows of operators that have no rule by running them.

    Raises:
        InputError: there is no such engine, dtype or way to recompute.
        ModelError, ClusterError: the input can't be used.
        UnsupportedOpError: an operator has no rule.
        InfeasibleError: no program fits; the message says which device lacks how much.
    """
    cluster = cluster if isinstance(cluster, Cluster) else load_cluster(cluster)
    wishes = Wishes(all_devices=all_devices, mesh=mesh, compare=compare, engine=engine, prove=prove)
    _check_batch(batch, cluster, allow_idle)
    progress("capturing the model")
    module = model if isinstance(model, nn.Module) else model()
    kind = examine(optimizer, module)

    def captured(recompute: str) -> Graph:
        graph = capture(module, batch, loss, autocast=autocast, recompute=recompute)
        if rules or discover:
            graph = with_rules(graph, rules or {}, discover=discover, progress=progress)
        return graph

    def choice(graph: Graph) -> PlannedPair:
        progress("stating the rules")
        return _chosen(graph, cluster, kind.states, wishes, progress)

    graph = captured(recompute or "")
    try:
        chosen = choice(graph)
    except InfeasibleError:
        if recompute is not None:
            raise
        known = {graph.digest}
        for recompute in WAYS:
            progress(f"no program fits: making activations again in the backward ({recompute})")
            graph = captured(recompute)
            if graph.digest in known:
                continue
            known.add(graph.digest)
            with contextlib.suppress(InfeasibleError):
                chosen = choice(graph)
                break
        else:
            raise
    program, shares, inside = _programs(chosen)
    kept = chosen.cluster
    idle = tuple(
        r for r in range(kept.world_size)
        if not inside and shares and not any(units[r] for units in shares.values())
    )  # fmt: skip
    return Plan(
        source=source or Source(), graph=graph, cluster=kept, optimizer=kind,
        program=program, shares=shares, inside=inside, idle=idle,
        left_out=tuple(cluster.devices[r].name for r in chosen.left),
        prediction=chosen.prediction, recipe=Recipe(
            batch=form_of(batch), autocast=autocast, recompute=recompute or ""
        ),
    )  # fmt: skip


def _chosen(
    graph: Graph, cluster: Cluster, states: int, wishes: Wishes, progress: Progress
) -> PlannedPair:
    """The best plan of the whole space, or of a narrower one if that is too wide to search."""
    for narrow, left in enumerate(NARROW):
        try:
            return choose(build_space(graph, narrow=narrow), cluster, states, wishes, progress)
        except TooEntangledError:
            if narrow + 1 == len(NARROW):
                raise
            progress(
                f"the graph is too entangled to search with {left}; now with {NARROW[narrow + 1]}"
            )
    raise AssertionError("the last space returns or raises")


def _programs(chosen: PlannedPair) -> tuple[Program, Shares, Inside | None]:
    """The program and its shares; on two mesh axes those between machines, and what is inside."""
    program = chosen.pair.scheduled.program
    shares = {name: chosen.pair.shares[name] for name in program.used_axes()}
    if chosen.between is None:
        return program, shares, None
    return chosen.between.program, chosen.between.shares, Inside(program=program, shares=shares)


@no_collector()
def plan_file(
    spec: str,
    cluster: Cluster | str | Path,
    *,
    progress: Progress = lambda text: None,
    **options: Unpack[Options],
) -> Plan:
    """:func:`plan` for a model file, ``path.py`` or ``path.py:function``."""
    cluster = cluster if isinstance(cluster, Cluster) else load_cluster(cluster)
    Wishes(engine=options.get("engine", "exact"))  # a wrong name is known before the long work
    file = load_model_file(spec)
    model, batch = build_without_data(file, progress)
    return plan(
        model, batch, cluster, loss=file.loss, optimizer=file.optimizer or default_optimizer,
        autocast=file.autocast, source=Source(path=str(file.path), function=file.function),
        rules=file.rules, progress=progress, **options,
    )  # fmt: skip


def build_without_data(file: ModelFile, progress: Progress) -> tuple[nn.Module, Batch]:
    """Model and batch without data; for real where the file's code reads tensor values."""
    return without_data(lambda: (file.model(), file.batch()), progress)


def without_data(make: Callable[[], Made], progress: Progress = lambda text: None) -> Made:
    """What ``make`` builds, without data; for real where it reads tensor values."""
    try:
        with torch_private.fake_mode():
            return make()
    except torch_private.data_dependent_errors():
        progress("model() or batch() reads tensor data: building them for real")
        return make()


def _check_batch(batch: Batch, cluster: Cluster, allow_idle: bool) -> None:
    entries = flatten(batch)
    if not entries:
        raise ModelError("the batch holds no tensors", hint="return the global batch from batch()")
    rows = min((t.shape[0] for t in entries.values() if t.dim()), default=1)
    if rows < cluster.world_size and not allow_idle:
        raise InputError(
            f"the global batch has {rows} rows, fewer than the {cluster.world_size} devices",
            hint="batch() must return the global batch; if it does, enlarge it, take devices "
            "out of the cluster file, or pass --allow-idle to let some devices wait",
        )


def compile(
    model: nn.Module,
    plan: Plan,
    *,
    loss: Loss | None = None,
    comm: Comm | None = None,
    device: torch.device | None = None,
    seed: int = 0,
    check: bool = True,
    backend: str = "eager",
) -> HapModule:
    """This rank's part of the model, to be trained like any module.

    Call it on every rank, inside an initialised process group (or for a plan of one rank,
    without one). The model must be the one that was planned, with the same weights on all
    ranks; its tensors are cut into shards and not kept.

    Args:
        loss: as given to :func:`plan`.
        comm: this rank's end of the collectives; default: the default process group.
        device: of the shards; default: the current CUDA device under NCCL, else the CPU.
        check: capture the model again and compare it with the plan.
        backend: ``eager``, or ``inductor`` to compile what runs between collectives. That
            happens in the first step, and takes from seconds to minutes.

    Raises:
        PlanError: the model differs from the planned one, or the world size does.
        InputError: there is no such backend, or what it needs is not installed.
    """
    if comm is None:
        comm = ProcessGroupComm() if dist.is_initialized() else LocalComm()
    if check:
        plan.check_model(_captured_again(plan, model, fake_batch(plan), loss))
    return HapModule(plan, model, comm, device or rank_device(), seed=seed, backend=backend)


def _captured_again(plan: Plan, model: nn.Module, batch: Batch, loss: Loss | None) -> Graph:
    """The graph of a model, captured as the plan's was."""
    return capture(
        model, batch, loss, autocast=plan.recipe.autocast, recompute=plan.recipe.recompute
    )


def fake_batch(plan: Plan) -> Batch:
    """A batch without data, of the shapes and the form that a plan was made for."""
    with torch_private.fake_mode():
        entries = {
            i.target: torch.empty(
                plan.graph.tensors[i.tensor].shape,
                dtype=getattr(torch, plan.graph.tensors[i.tensor].dtype),
            )
            for i in plan.graph.role("input")
        }
    if plan.recipe.batch is not None:
        return rebuild(plan.recipe.batch, entries)
    if "*" in entries:
        return entries["*"]
    positional = all(name.isdigit() for name in entries)
    return tuple(entries.values()) if positional else entries


def verify(
    plan: Plan,
    file: ModelFile | None = None,
    *,
    processes: bool = False,
    dtype: str = "float64",
    seed: int = 0,
    backend: str = "eager",
    device: str = "cpu",
) -> Verdict:
    """Compare the plan's program with the model on one device; see :mod:`hap.runtime.verify`.

    Args:
        file: the model file; default: the one that the plan was made from.
        processes: start a process per rank instead of emulating the ranks in one: gloo processes
            on the CPU, NCCL processes on CUDA, which share GPUs if there are fewer than ranks.
        dtype: ``float64`` (error <= 1e-9) or ``float32`` (<= 1e-4).
        backend: what runs the ranks' graphs, as in :func:`compile`.
        device: ``cpu`` or ``cuda``, for the ranks and for the reference.

    Raises:
        InputError: there is no such dtype, or no such device on this machine.
        PlanError: the model file is not the one that was planned.
    """
    if dtype not in ("float64", "float32"):
        raise InputError(f"dtype {dtype!r}", hint="verify in float64 or float32")
    if device not in ("cpu", "cuda"):
        raise InputError(f"device {device!r}", hint="verify on cpu or cuda")
    if device == "cuda" and not torch.cuda.is_available():
        raise InputError("this machine has no CUDA device", hint="verify with --device cpu")
    file = file or model_file_of(plan)
    model, batch = _real_build(file, seed)
    plan.check_model(_captured_again(plan, model, batch, file.loss))
    optimizer = file.optimizer or default_optimizer
    if not processes:
        return verify_plan(
            plan, model, batch, file.loss, optimizer, dtype=dtype, backend=backend,
            device=torch.device(device),
        )  # fmt: skip

    def run(world_size: int, observer: Any) -> list[Any]:
        args = (plan.to_json(), _spec(file), dtype, seed, backend)
        if device == "cpu":
            return spawn(_observe_rank, world_size, args=args)
        return spawn(_observe_rank, world_size, args=args, backend="nccl", where=SharedGpus())

    return verify_plan(
        plan, model, batch, file.loss, optimizer, dtype=dtype, run=run, device=torch.device(device)
    )


def _observe_rank(data: dict[str, Any], spec: str, dtype: str, seed: int, backend: str) -> Observed:
    """What one real process of ``verify`` sees."""
    file = load_model_file(spec)
    model, batch = _real_build(file, seed)
    observer = Observer.make(
        Plan.from_json(data), model, batch, file.optimizer or default_optimizer, dtype, backend,
        rank_device(),
    )  # fmt: skip
    return observer(ProcessGroupComm())


def _real_build(file: ModelFile, seed: int) -> tuple[nn.Module, Batch]:
    torch.manual_seed(seed)
    return file.model(), file.batch()


def _spec(file: ModelFile) -> str:
    return f"{file.path}:{file.function}"


class Trainer:
    """One rank's training of a planned model file: module, optimizer and data.

    Make it on every rank, inside a process group, or under torchrun or srun.

    Raises:
        PlanError: the model file is not the one that was planned, or the world size differs.
    """

    def __init__(
        self, plan: Plan, file: ModelFile | None = None, *, backend: str = "eager"
    ) -> None:
        if plan.world_size > 1 and not dist.is_initialized():
            init_from_env()
        self._file = file or model_file_of(plan)
        torch.manual_seed(self._file.seed)
        self._plan = plan
        self._rank = dist.get_rank() if dist.is_initialized() else 0
        model = self._file.model()
        self.module = compile(
            model, plan, loss=self._file.loss, seed=self._file.seed, backend=backend
        )
        make = self._file.optimizer or default_optimizer
        self._optimizer = make_optimizer(make, self.module)
        half = plan.recipe.autocast == "float16"  # its gradients underflow; bfloat16's don't
        self._scaler = GradScaler(self.module, enabled=half)

    def batches(self) -> Iterator[Batch]:
        """Global batches: the file's ``batches()``, over and over, or ``batch()`` each time."""
        while True:
            yield from self._file.batches() if self._file.batches else (self._file.batch(),)

    def step(self, batch: Batch) -> float:
        """Train on this rank's part of a global batch; returns the global loss."""
        self._optimizer.zero_grad()
        loss = call(self.module, self._plan.local_batch(batch, self._rank))
        self._scaler.scale(loss).backward()
        self._scaler.step(self._optimizer)
        self._scaler.update()
        return loss.item()  # type: ignore[no-any-return]


def train(
    plan: Plan,
    file: ModelFile | None = None,
    *,
    steps: int,
    on_step: Callable[[int, float, float], None] = lambda step, loss, seconds: None,
    backend: str = "eager",
) -> list[float]:
    """Train a planned model file on this rank, as :class:`Trainer` does; returns the losses.

    Args:
        backend: what runs the rank's graphs, as in :func:`compile`.
        on_step: called with (step from 1, global loss, seconds of the step).
    """
    trainer = Trainer(plan, file, backend=backend)
    losses = []
    for number, batch in enumerate(itertools.islice(trainer.batches(), steps), 1):
        start = time.perf_counter()
        losses.append(trainer.step(batch))
        on_step(number, losses[-1], time.perf_counter() - start)
    return losses


def code(plan: Plan, rank: int) -> str:
    """The emitted Python of one rank's forward and backward."""
    emitted = emit(plan, rank, torch.device("cpu"))
    return f"# forward of rank {rank}\n{emitted.forward.code}\n# backward of rank {rank}\n{emitted.backward.code}"
