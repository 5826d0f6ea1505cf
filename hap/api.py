"""The Python API: plan a model, compile a rank's part of it, verify a plan."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from hap.capture import tracing
from hap.capture.building import build_without_data
from hap.capture.checks import check_module, check_parameters, warn_of_eval
from hap.capture.fixed_entries import fix_entries
from hap.capture.hidden_tensors import real_if_needed
from hap.capture.model_file import ModelFile, load_model_file, model_file_of, with_weights
from hap.capture.recompute import WAYS
from hap.capture.tracing import Loss, check_recipe
from hap.capture.user_optimizer import MakeOptimizer, default_optimizer, examine
from hap.cluster.cluster_file import load_cluster
from hap.cluster.topology import Cluster
from hap.errors import InfeasibleError, InputError, ModelError
from hap.gc_pause import gc_paused
from hap.gradient_roundings import choose_with_roundings
from hap.ir.axes import Shares
from hap.ir.batch import Batch, flatten, form_of
from hap.ir.graph import Graph
from hap.ir.half_gradients import with_half_gradients
from hap.ir.mesh import Inside
from hap.ir.optimizer_kind import OptimizerKind
from hap.ir.plan import Plan, Recipe, Source
from hap.ir.program import Program
from hap.plan_cache import PlanCache
from hap.plan_rows import check_rows
from hap.planned_model import captured_again, check_graph, check_model
from hap.rule_sources import with_rules
from hap.runtime.agreement import check_weights, warn_of_other_gpu
from hap.runtime.collectives import Comm, LocalComm, ProcessGroupComm
from hap.runtime.hap_module import GradScaler, HapModule, clip_grad_norm_, emit
from hap.runtime.launch import rank_device, spawn
from hap.runtime.one_device import Observed
from hap.runtime.optimizer_checks import watch
from hap.runtime.shared_gpu import SharedGpus
from hap.runtime.verify import Observer, Verdict
from hap.runtime.verify import verify as verify_plan
from hap.synthesizer.plan_options import PlanOptions
from hap.synthesizer.plan_prediction import unruled
from hap.synthesizer.planner import PlannedPair
from hap.synthesizer.recompute_modes import choose_for_model, short_of_memory

__all__ = [
    "GradScaler",
    "clip_grad_norm_",
    "code",
    "compile",
    "model_file_of",
    "plan",
    "plan_again",
    "plan_file",
    "verify",
]

Progress = Callable[[str], None]


@gc_paused()
def plan(
    model: nn.Module | Callable[[], nn.Module],
    batch: Batch,
    cluster: Cluster | str | Path,
    *,
    loss: Loss | None = None,
    optimizer: MakeOptimizer = default_optimizer,
    autocast: str = "",
    float32_matmul_precision: str = "",
    rules: Mapping[str, Sequence[str]] | None = None,
    fixed: Sequence[str] = (),
    options: PlanOptions = PlanOptions(),
    source: Source = Source(),
    progress: Progress = lambda text: None,
    cache: PlanCache | None = None,
) -> Plan:
    """Return the fastest program found for one training step of ``model`` on ``cluster``.

    It needs no process group and no GPU, and reads only shapes and dtypes of the weights and of the
    batch. It warns of a model in ``eval()`` whose dropout or running statistics the plan would lack. It
    traces the model's forward, and runs ``optimizer`` on small parameters. Parts of the
    search run in forks of this process. Rows that are discovered for an operator without a rule are
    kept on disk: see :mod:`hap.rule_cache`. Equal inputs give equal plans.

    Args:
        model: the module, real, on the meta device or built under fake tensors, or a function that
            returns it, which is called once.
        batch: the *global* batch: a tensor, a tuple, or a dict by keyword; entries may be nested.
        cluster: a cluster, or an argument of :func:`hap.load_cluster`.
        loss: ``loss(output, batch)``, if the module's output is no loss.
        optimizer: makes the optimizer, whose states take memory; see
            :data:`hap.capture.user_optimizer.MakeOptimizer`.
        autocast: ``bfloat16`` or ``float16``: the forward and the loss run in automatic mixed
            precision.
        float32_matmul_precision: of products on GPUs, as torch names it; default: torch's setting
            is left alone, and the price is that of ``highest``.
        rules: rules of operators that the table lacks, as lines: see docs/rules.md.
        fixed: names of entries of the batch, of whole numbers or booleans, that are the same in every
            batch: they are constants of the program, and shapes may depend on them.
        options: see :class:`hap.PlanOptions`.
        source: the model file, for the commands that load it again.
        progress: called now and then with a line of text, in this thread. To stop the search, raise
            :class:`hap.errors.PlanningStopped` in it.
        cache: returns the plan if it was made before from equal inputs, and keeps a new one on disk.

    Raises:
        InputError: the batch has fewer rows than the cluster has devices, without
            ``options.allow_idle``; a dtype, a precision, a way to recompute or a rounding is unknown;
            a pin or a kept device does not exist; options exclude each other, or ask for two mesh
            axes on a cluster that is no mesh; or the figures give a step of more than ten hours.
        ModelError: the model, the batch, the loss, the optimizer or a rule can't be used.
        ClusterError: the cluster can't be used.
        UnsupportedOpError: an operator has no rule, and none can be found: it draws random numbers,
            for example, or ``options.strict_rules`` is true.
        InfeasibleError: no program fits; the message names the devices and the lacking bytes.
        PlanningStopped: raised by ``progress`` or by a signal handler before there was a plan that fits.
            Later it ends the search: the plan is the best one so far, and its ``stopped`` has the message.
    """
    check_recipe(autocast, "", float32_matmul_precision)
    wanted = Recipe(autocast=autocast, float32_matmul_precision=float32_matmul_precision)
    cluster = _checked(cluster, options)
    batch = fix_entries(batch, fixed)
    _check_batch(batch, cluster, options.allow_idle)
    progress("capturing the model")
    module = model if isinstance(model, nn.Module) else model()
    check_module(module)
    check_parameters(module)
    warn_of_eval(module)
    kind = examine(optimizer, module)
    check_recipe("", options.recompute or "")
    step = tracing.captured(module, batch, loss, autocast=autocast)

    @functools.cache
    def captured(recompute: str, gradients: str) -> Graph:
        graph = step.recomputing(recompute)
        graph = replace(
            with_half_gradients(graph, gradients), products=wanted.products,
            whole_parameters=kind.whole_parameters, fused_update=kind.fused,
        )  # fmt: skip
        return with_rules(graph, rules or {}, strict=options.strict_rules, progress=progress)

    wanted = replace(wanted, batch=form_of(batch), training=module.training)
    key = ""
    if cache is not None:
        key = cache.key(captured(options.recompute or "", ""), cluster, kind, wanted, options)
        if known := cache.get(key):
            return replace(known, source=source)
    graph, how, chosen = choose_with_roundings(
        captured, WAYS, cluster, kind.states, options, progress
    )
    recipe = replace(wanted, recompute=how[0], gradients=how[1])
    made = _plan_of(chosen, cluster, source, graph, kind, recipe)
    if cache is not None:
        cache.put(key, made)
    return made


def plan_again(plan: Plan, cluster: Cluster, options: PlanOptions) -> Plan:
    """Return :func:`plan_file` of a plan's model file on another cluster.

    The graph is that of the plan, unless it may be captured in a better way: where memory is short, with more
    recomputation. A plan without a model file keeps its graph.

    Args:
        options: they allow idle devices.

    Raises:
        Those of :func:`plan`.
    """
    source, recipe = plan.source, plan.recipe
    plain = not source.path or not (recipe.recompute or recipe.gradients)
    if plain and not (options.recompute or options.allow):
        given = replace(options, accumulate=False) if source.path else options
        try:
            graph, _, chosen = choose_for_model(
                lambda mode: plan.graph, (), cluster, plan.optimizer.states, given
            )
        except InfeasibleError:
            if not source.path:
                raise
        else:
            if not (source.path and short_of_memory(chosen)):
                return _plan_of(chosen, cluster, source, graph, plan.optimizer, recipe)
    spec = f"{source.path}:{source.function}"
    return plan_file(spec, cluster, options=options, arguments=source.arguments)


def _plan_of(
    chosen: PlannedPair, cluster: Cluster, source: Source, graph: Graph, kind: OptimizerKind,
    recipe: Recipe,
) -> Plan:  # fmt: skip
    program, shares, inside = _programs(chosen)
    kept, staged = chosen.cluster, chosen.pipeline
    idle = tuple(
        r for r in range(kept.world_size)
        if not inside and not staged and shares and not any(u[r] for u in shares.values())
    )  # fmt: skip
    return Plan(
        source=source, graph=graph, cluster=kept, optimizer=kind,
        program=program, shares=shares, inside=inside, idle=idle,
        stages=staged.stages if staged else None,
        left_out=tuple(cluster.devices[r].name for r in chosen.left),
        prediction=chosen.prediction,
        recipe=recipe,
        unruled=unruled(chosen.pair, chosen.cost), stopped=chosen.stopped,
    )  # fmt: skip


def _programs(chosen: PlannedPair) -> tuple[Program, Shares, Inside | None]:
    """Return the program and its shares (between machines, or over time), and the inside."""
    if chosen.pipeline is not None:
        time, parts = chosen.pipeline.over_time, chosen.pipeline.microbatches
        return time.program, time.shares(parts) or {}, None
    program = chosen.pair.timeline.program
    shares = {name: chosen.pair.shares[name] for name in program.used_axes()}
    if chosen.between is None:
        return program, shares, None
    return chosen.between.program, chosen.between.shares, Inside(program=program, shares=shares)


@gc_paused()
def plan_file(
    spec: str,
    cluster: Cluster | str | Path,
    *,
    options: PlanOptions = PlanOptions(),
    progress: Progress = lambda text: None,
    arguments: str = "",
) -> Plan:
    """Return :func:`plan` of a model file, ``path.py`` or ``path.py:function``.

    The file's code is executed. Model and batch are built under fake tensors, or really if that code
    reads values. The plan names the file by ``spec`` as it is given: a relative path stays relative.

    Args:
        cluster, options, progress: as in :func:`plan`.
        arguments: the file's own, which the plan names; the caller sets ``sys.argv``.

    Raises:
        ModelError: the file can't be used; the message has its line. Those of :func:`plan`.
    """
    cluster = _checked(cluster, options)
    file = load_model_file(spec)
    model, batch = build_without_data(file, progress)
    of_model = functools.partial(
        plan, batch=batch, cluster=cluster, loss=file.loss, optimizer=file.optimizer or default_optimizer,
        autocast=file.autocast, float32_matmul_precision=file.float32_matmul_precision, source=Source(path=str(file.path), function=file.function, arguments=arguments),
        rules=file.rules, fixed=file.fixed, options=options, progress=progress,
    )  # fmt: skip
    return real_if_needed(of_model, model, file.model, progress)


def _checked(cluster: Cluster | str | Path, options: PlanOptions) -> Cluster:
    """Return the cluster; options that it can't have are refused before a model is made."""
    cluster = cluster if isinstance(cluster, Cluster) else load_cluster(cluster)
    options.kept_ranks(cluster)
    return cluster


def _check_batch(batch: Batch, cluster: Cluster, allow_idle: bool) -> None:
    entries = flatten(batch)
    if not entries:
        raise ModelError("the batch holds no tensors", hint="return the global batch from batch()")
    rows = max((t.shape[0] for t in entries.values() if t.dim()), default=1)
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
    """Return this rank's part of the model, to be trained like any module.

    Call it on every rank, inside an initialised process group (for a plan of one rank, without
    one): the ranks compare digests of their programs. The model must be the one that was planned,
    whole, with real tensors and the same weights on all ranks; its tensors are cut into shards and
    not kept. So each process holds the whole model until then.

    Args:
        loss: the ``loss`` of :func:`plan`.
        comm: this rank's end of the collectives; default: the default process group.
        device: of the shards; default: the current CUDA device under NCCL, else the CPU.
        seed: of dropout masks and other random numbers in the step; the same on all ranks.
        check: compare the plan's rows with the rules, and on the first rank of each machine capture
            the model again and compare it with the plan. In the first call, compare the entries of the
            batch that are whole on every rank.
        backend: ``eager``; ``inductor`` to compile what runs between collectives, which
            happens in the first step and takes from seconds to minutes; or ``cudagraphs`` to launch the
            kernels of a step as CUDA graphs (:mod:`hap.runtime.cuda_graphs`); or
            ``inductor-cudagraphs`` for both.

    Raises:
        PlanError: the model differs from the planned one, or the world size does; no rule gives an
            instruction of the plan; the ranks hold different programs, seeds or weights. Only with
            ``check`` are the model, the rules and the weights compared.
        ModelError: the model can't be captured; with ``check`` only.
        InputError: there is no such backend, or what it needs is not installed.
    """
    if comm is None:
        comm = ProcessGroupComm() if dist.is_initialized() else LocalComm()
    device = device or rank_device()
    if check:
        check_rows(plan)
        check_model(plan, model, loss, comm)
        check_weights(model, comm)
        if device.type == "cuda" and comm.world_size == plan.world_size:
            warn_of_other_gpu(plan.cluster.devices[comm.rank], device)
    module = HapModule(plan, model, comm, device, seed=seed, backend=backend)
    module._compares = check
    watch(model, module)
    return module


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

    It trains three steps on all ranks and on one device, on this machine. Memory must suffice for
    several copies of the whole model, its gradients and optimizer states in ``dtype``, for one
    reference in float64, and for the activations of the whole global batch.

    Args:
        file: the model file, whose code is executed; default: that of the plan.
        processes: start a process per rank instead of emulating the ranks in one: gloo processes
            on the CPU, NCCL processes on CUDA, which share GPUs if there are fewer than ranks.
        dtype: of the ranks. ``float64``: all floats are float64, and relative errors up to 1e-9 are
            accepted. ``float32``: floats keep the model's dtypes, and with ``autocast`` the plan's;
            errors are relative to the module in float64. Accepted is the largest of 1e-4, twice the
            epsilon of a half precision in the program, and four times the module's own error.
        seed: of torch's generators before model and batch are made.
        backend: runs the ranks' graphs, as in :func:`compile`.
        device: ``cpu`` or ``cuda``, for the ranks and for the reference.

    Returns:
        A row per loss, gradient, trained tensor and random operator, and whether all agree. A
        difference is no error: see ``ok`` and ``first_bad``.

    Raises:
        InputError: there is no such dtype or backend, or no such device on this machine.
        ModelError: the model file can't be used, or its model is on the meta device.
        PlanError: the plan names no model file and none is given; the model file is not the one that
            was planned; or no rule gives an instruction of the plan.
        VerifyError: the program fails on a rank that is emulated.
        HapError: a process of a rank failed, with ``processes``.
    """
    if dtype not in ("float64", "float32"):
        raise InputError(f"unknown dtype {dtype!r}", hint="verify in float64 or float32")
    if device not in ("cpu", "cuda"):
        raise InputError(f"unknown device {device!r}", hint="verify on cpu or cuda")
    if device == "cuda" and not torch.cuda.is_available():
        raise InputError("this machine has no CUDA device", hint="verify with --device cpu")
    check_rows(plan)
    file = file or model_file_of(plan)
    model, batch = _real_build(file, seed)
    check_graph(plan, model, captured_again(plan, model, batch, file.loss))
    optimizer = file.optimizer or default_optimizer
    if not processes:
        return verify_plan(
            plan, model, batch, file.loss, optimizer, dtype=dtype, backend=backend,
            device=torch.device(device),
        )  # fmt: skip

    def run(world_size: int, observer: Any) -> list[Any]:
        spec = f"{file.path}:{file.function}"
        args = (plan.to_json(), spec, dtype, seed, backend, observer.draws)
        if device == "cpu":
            return spawn(_observe_rank, world_size, args=args)
        return spawn(_observe_rank, world_size, args=args, backend="nccl", where=SharedGpus())

    return verify_plan(
        plan, model, batch, file.loss, optimizer, dtype=dtype, run=run, device=torch.device(device)
    )


def _observe_rank(
    data: dict[str, Any], spec: str, dtype: str, seed: int, backend: str, draws: bool
) -> Observed:
    """Results of one real process of ``verify``."""
    file = load_model_file(spec)
    model, batch = _real_build(file, seed)
    observer = Observer.make(
        Plan.from_json(data), model, batch, file.optimizer or default_optimizer, dtype, backend,
        rank_device(),
    )  # fmt: skip
    return replace(observer, draws=draws)(ProcessGroupComm())


def _real_build(file: ModelFile, seed: int) -> tuple[nn.Module, Batch]:
    torch.manual_seed(seed), random.seed(seed), np.random.seed(seed % 2**32)
    return with_weights(file.model(), file), file.batch()


def code(plan: Plan, rank: int) -> str:
    """Return the emitted Python of the forward and backward of a rank, counted from 0, for a CPU."""
    emitted = emit(plan, rank, torch.device("cpu"))
    forward, backward = (
        graph.python_code("self").src for graph in (emitted.forward, emitted.backward)
    )
    return f"# forward of rank {rank}\n{forward}\n# backward of rank {rank}\n{backward}"
