"""``HapModule``: an ``nn.Module`` whose parameters are one rank's shards."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, Self

import torch
from torch import Tensor, nn

from hap import optim
from hap.capture import torch_private
from hap.capture.checks import BY_MODE, check_names
from hap.capture.computed_weights import computed_weights
from hap.complex_tensors import as_real
from hap.errors import InputError, PlanError
from hap.ir.batch import given, other_entries
from hap.ir.plan import Plan
from hap.ir.plan_digest import program_digest
from hap.runtime.agreement import check_whole_entries, elements_at_once
from hap.runtime.apart import apart
from hap.runtime.batch_entries import entry, missing
from hap.runtime.collectives import Comm
from hap.runtime.compiled import Runnable, captures, check_backend, runnable
from hap.runtime.context import Context
from hap.runtime.cuda_graphs import CudaGraphs, check_graphs
from hap.runtime.drawn_numbers import draws
from hap.runtime.emit import Emitted, Emitter
from hap.runtime.lanes import lane_of
from hap.runtime.module_parts import ModulePart, Submodule, constants_by_module
from hap.runtime.pipeline.runner import pipeline
from hap.runtime.shards import cut, gather
from hap.runtime.two_level_comm import along_axes


class HapModule(ModulePart):
    """This rank's part of a planned model; ``module(*local_batch)`` returns the global loss.

    Parameters keep their names and hold the local shards, so that any elementwise optimizer
    of torch.optim works on them. ``loss.backward()`` sets each shard's gradient, reduced over
    all ranks.

    Args:
        plan: the plan; its graph must be the model's (see :meth:`hap.ir.plan.Plan.check_model`).
        model: the whole model, with real tensors; they are cut and not kept.
        comm: this rank's communicator.
        device: the device of the shards.
        widen: run all floats as float64 (for verification).
        backend: the backend of the two graphs, one of :data:`hap.runtime.compiled.BACKENDS`.

    Raises:
        PlanError: the world size is not the plan's, or the ranks hold different programs or seeds.
        ModelError: the model names a tensor like an attribute of this class.
        InputError: the backend is unknown, or a tool that it needs is not installed.
    """

    def __init__(
        self, plan: Plan, model: nn.Module, comm: Comm, device: torch.device, *,
        seed: int = 0, widen: bool = False, backend: str = "eager",
    ) -> None:  # fmt: skip
        super().__init__()
        check_backend(backend, device)
        if captures(backend):
            check_graphs(plan, comm)
        if comm.world_size != plan.world_size:
            raise PlanError(
                f"the plan is for {plan.world_size} ranks, this run has {comm.world_size}",
                hint=f"start {plan.world_size} processes, one per device that the plan uses, or plan anew",
            )
        digest = program_digest(plan)
        if not comm.agree(digest):
            raise PlanError(
                "the ranks hold different programs", hint="give every rank the same plan file"
            )
        if not comm.agree(str(seed)):
            raise PlanError(
                f"the ranks have different seeds, rank {comm.rank} has {seed}: replicas would draw different masks",
                hint="give hap.compile the same seed on all ranks: shards still draw different numbers",
            )
        check_names(model)
        self._plan, self._comm, self._device, self._digest = plan, comm, device, digest
        self._comms = along_axes(plan, comm)
        self._code = replace(
            _code(plan, comm, device, widen, backend),
            precision=plan.recipe.float32_matmul_precision,
        )
        lane = lane_of(comm, device)
        self._ctx = Context(self._comms[-1], seed, across=self._comms[0], lane=lane)
        if device.type == "cuda" and comm.world_size > 1 and draws(plan.graph):
            self._ctx.at_once = elements_at_once(comm, device)
        self._held: dict[str, tuple[dict[str, Any], str]] = {}
        self._same = {}  # every name of a tied tensor -> its first name
        for tensors in (
            dict(model.named_parameters(remove_duplicate=False)),
            dict(model.named_buffers(remove_duplicate=False)),
        ):
            first: dict[int, str] = {}
            for name, tensor in tensors.items():
                self._same[name] = first.setdefault(id(tensor), name)
        self._persistent = set(model.state_dict(keep_vars=True))
        roles = {i.target: i.tensor for i in plan.graph.inputs if i.role in ("parameter", "buffer")}
        self._inputs = roles
        buffers = {i.target for i in plan.graph.inputs if i.role == "buffer"}
        for name, parameter in model.named_parameters():
            shard = self._cut(name, parameter)
            if name in buffers:  # the forward changes it
                self._put(name, shard.detach())
                continue
            mine = nn.Parameter(shard, parameter.requires_grad)
            vars(mine).update(vars(parameter))  # an optimizer may read the user's attributes
            optim.mark(mine, optim.Shard(comm=comm, copies=self._copies(name)))
            self._put(name, mine)
        state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        self._complex = {n for n, t in state.items() if t.is_complex() and n in roles}
        for name, buffer in _tensors(model).items():
            self._put(name, self._cut(name, buffer))
        self._planned_in_training = model.training or plan.recipe.training
        by_mode = plan.recipe.training and any(node.op in BY_MODE for node in plan.graph.nodes)
        self._eval_keeps_buffers = model.training or by_mode
        self.train(model.training)
        self._parts = [*self.modules()][1:]
        frozen = (name for name, p in self.named_parameters() if not p.requires_grad)
        self._frozen = [(name, *self._held[name]) for name in frozen]
        wanted = [i for i in plan.graph.inputs if i.role != "tangent"]
        self._order = [(i.role, i.target, i.tensor) for i in wanted]
        self._graphs = None
        if captures(backend):
            batch = [k for k, (role, *_) in enumerate(self._order) if role == "input"]
            self._graphs = CudaGraphs(self._code, self._ctx, batch)
        self._compares = False
        constants = constants_by_module(model)
        for path, part in self.named_modules():
            vars(part)["_constants"] = constants.get(path, frozenset())

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return the loss over the *global* batch, the same on every rank.

        Args: this rank's part of the batch in the form that the model takes, from
            :meth:`hap.ir.plan.Plan.local_batch`.
        """
        batch = given(args, kwargs)
        state = self._state()
        tensors = []
        for role, target, tensor in self._order:
            if role != "input":
                tensors.append(state[target])
                continue
            if target not in batch:
                raise missing(self._plan, target, args, kwargs)
            part = entry(self._plan, self._comm.rank, target, batch[target], tensor)
            tensors.append(part.to(self._device))
        self._check_call(args, kwargs)
        if self._compares:
            check_whole_entries(self._plan, batch, self._comm)
            self._compares = False
        self._ctx.training, self._ctx.wanted = self.training, torch.is_grad_enabled()
        with self._code.as_planned(self._device):
            if self._graphs and self._graphs.ready():
                loss, *buffers = self._graphs.step(tensors)
            else:
                loss, *buffers = _Step.apply(self._code, self._ctx, *tensors)  # type: ignore[no-untyped-call]
        if self.training or not self._eval_keeps_buffers:
            with torch.no_grad():
                for target, new in zip(self._code.buffers, buffers, strict=True):
                    state[target].copy_(new)
        self._ctx.step += 1
        return loss

    def train(self, mode: bool = True) -> Self:
        """Set the mode of the whole module.

        Raises:
            PlanError: ``mode`` is True, and the model was in ``eval()`` when it was planned.
        """
        if mode and not self._planned_in_training:
            raise PlanError(
                "the model was in eval() when it was planned, so that the plan has no dropout and does not "
                "update running statistics",
                hint="call model.train() before hap.plan; models of from_pretrained are in eval()",
            )
        return super().train(mode)

    def _check_call(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Raise ``PlanError`` if the plan computes something else than this call asks for."""
        mode = self.training
        if any(part.training is not mode for part in self._parts):
            what = "a submodule is in another mode than the module, which runs as a whole in train() or eval()"
            raise PlanError(
                what, hint="set its mode before hap.plan, or call train() or eval() of the whole"
            )
        if torch.is_grad_enabled():
            thawed = [name for name, held, leaf in self._frozen if held[leaf].requires_grad]
            if thawed:
                raise PlanError(
                    f"the plan has no gradient for {thawed[0]!r}, which required no grad when it was planned",
                    hint="set requires_grad before hap.plan, and plan anew to train other parameters",
                )
        recipe, kind = self._plan.recipe, self._device.type
        if recipe.batch is not None and (other := other_entries(recipe.batch, args, kwargs)):
            raise PlanError(
                f"the plan is for another batch: {', '.join(other[:4])}",
                hint="plan anew with this batch, or leave these entries out",
            )
        if torch.is_autocast_enabled(kind):
            active = str(torch.get_autocast_dtype(kind)).removeprefix("torch.")
            if active != recipe.autocast:
                planned = recipe.autocast or "no autocast"
                raise PlanError(
                    f"the module runs inside torch.autocast with {active}, the plan has {planned}",
                    hint=f'plan with autocast = "{active}", or leave torch.autocast out',
                )

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise PlanError(
            "the module of a plan can't be copied or pickled: it holds this rank's communicator",
            hint="save it by hap.save, or module.full_state_dict(); copy its parameters: "
            "{n: p.detach().clone() for n, p in module.named_parameters()}",
        )

    def without_dropout(self) -> None:
        """Disable dropout from now on, to compare with a run on one device."""
        self._ctx.dropping = False

    def record_draws(self) -> dict[str, Tensor]:
        """Collect a copy of all random numbers from now on, by ``step/operator``."""
        self._ctx.drawn = {}
        return self._ctx.drawn

    @contextlib.contextmanager
    def in_turn(self) -> Iterator[None]:
        """Run each collective synchronously inside this context, to debug or trace.

        All ranks must enter it together, between two steps.
        """
        with self._ctx.in_turn():
            yield

    def _cut(self, name: str, whole: Tensor) -> Tensor:
        tensor = self._inputs.get(name)
        if tensor is None:  # the step does not use it: keep it whole
            return whole.detach().clone().to(self._device)
        return cut(self._plan, tensor, whole, self._comm.rank).to(self._device)

    def _put(self, name: str, tensor: Tensor) -> None:
        """Register a tensor under a dotted name, in empty submodules named as the model's."""
        owner: nn.Module = self
        *path, leaf = name.split(".")
        for step in path:
            if step not in owner._modules:
                owner.add_module(step, Submodule())
            owner = owner.get_submodule(step)
        if isinstance(tensor, nn.Parameter):
            owner.register_parameter(leaf, tensor)
            self._held[name] = owner._parameters, leaf
        else:
            owner.register_buffer(leaf, tensor, persistent=name in self._persistent)
            self._held[name] = owner._buffers, leaf

    def _state(self) -> dict[str, Tensor]:
        """Return parameters and buffers by name; faster than torch's own search of submodules."""
        try:
            return {name: held[leaf] for name, (held, leaf) in self._held.items()}
        except KeyError:
            gone = next(name for name, (held, leaf) in self._held.items() if leaf not in held)
            raise PlanError(
                f"{gone!r} was removed from the module, as by nn.utils.parametrize or weight_norm",
                hint="change the model before hap.plan: a plan computes the model as it was planned",
            ) from None

    def full_state_dict(self) -> dict[str, Tensor]:
        """Return the model's state dict with whole tensors, on this rank's device; a collective call."""
        state = self._state()
        whole = {}
        for name in self._same:
            if name not in self._persistent:
                continue
            first = self._same[name]
            if first not in whole:
                tensor = self._inputs.get(first)
                shard = state[first].detach()
                if tensor:
                    shard = gather(self._plan, tensor, shard, self._comms, self._comm.rank)
                whole[first] = torch.view_as_complex(shard) if first in self._complex else shard
            whole[name] = whole[first]
        return whole

    def load_full_state_dict(self, state_dict: Mapping[str, Tensor]) -> None:
        """Load this rank's shards from a state dict of the model with whole tensors.

        Raises:
            PlanError: a name is missing or unknown, or a tensor's shape is not the model's.
        """
        missing = self._persistent - state_dict.keys()
        unknown = state_dict.keys() - self._persistent
        if missing or unknown:
            raise PlanError(
                f"the state dict lacks {sorted(missing)[:3]} and has unknown {sorted(unknown)[:3]}",
                hint="pass the state dict of the model that was planned",
            )
        state = self._state()
        for name, saved in state_dict.items():
            first = self._same[name]
            whole = as_real(saved) if first in self._complex else saved
            tensor = self._inputs.get(first)
            expected = self._plan.graph.tensors[tensor].shape if tensor else state[first].shape
            if tuple(whole.shape) != tuple(expected):
                raise PlanError(
                    f"{name} has shape {tuple(whole.shape)} in the state dict, "
                    f"{tuple(expected)} in the plan",
                    hint="pass the state dict of the model that was planned",
                )
            with torch.no_grad():
                state[first].copy_(self._cut(first, whole))

    def _copies(self, name: str) -> int:
        """Number of ranks, this one included, that hold the same elements of a parameter."""
        tensor = self._inputs.get(name)
        world, rank = self._comm.world_size, self._comm.rank
        return self._plan.copies(tensor, rank) if tensor else world

    def grad_norm(self) -> Tensor:
        """Return the 2-norm of the whole model's gradient; replicated elements count once."""
        total = torch.zeros((), dtype=torch.float64, device=self._device)
        for name, parameter in self.named_parameters():
            if parameter.grad is None:
                continue
            total += parameter.grad.double().square().sum() / self._copies(name)
        return self._comm.all_reduce(total, "one shot").sqrt()


def clip_grad_norm_(module: HapModule, max_norm: float) -> Tensor:
    """Scale all gradients so that their *global* 2-norm is at most ``max_norm``.

    A collective call: every rank must make it, after the gradients are unscaled. A norm that is not a number
    makes all gradients so, as torch's default.

    Returns:
        The norm before scaling, a float64 tensor without dims.

    Raises:
        InputError: ``module`` is no module of :func:`hap.compile`.
    """
    if not isinstance(module, HapModule):
        raise InputError(
            f"hap.clip_grad_norm_ of a {type(module).__name__}",
            hint="pass the module that hap.compile returns: the norm is over its shards on all ranks",
        )
    norm = module.grad_norm()
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for parameter in module.parameters():
        if parameter.grad is not None:
            parameter.grad.mul_(scale.to(parameter.grad.dtype))
    return norm


class GradScaler(torch_private.AgreeingGradScaler):
    """``torch.amp.GradScaler`` for a sharded module: all ranks skip a step, or none does.

    If one rank finds an infinity in its shards, all ranks skip the step, so that the scale stays
    the same on all ranks. Every rank must make the same calls.

    Args:
        module: the module that is trained.
        options: those of torch's class, except the device, which is the module's.
    """

    def __init__(self, module: HapModule, **options: Any) -> None:
        super().__init__(module._device.type, **options)
        self._comm = module._comm
        if self.is_enabled():  # a pipeline computes its gradients before the backward is called
            module._ctx.loss_scale = self.get_scale

    def agreed(self, found: Tensor) -> Tensor:
        """Return the sum over all ranks of ``found``, which is 0 or 1 on each."""
        return self._comm.all_reduce(found, "one shot")


def _code(plan: Plan, comm: Comm, device: torch.device, widen: bool, backend: str) -> Runnable:
    if plan.stages:
        return pipeline(plan, comm, device, widen=widen, backend=backend)
    return runnable(emit(plan, comm.rank, device, widen=widen), backend, device)


def emit(plan: Plan, rank: int, device: torch.device, *, widen: bool = False) -> Emitted:
    """Return the two graphs of one rank of a plan."""
    part = plan.part(rank)
    return Emitter(
        graph=part.graph, program=part.program, shares=part.shares, rank=part.rank, device=device,
        widen=widen, offsets=part.offsets, alone=plan.world_size == 1,
    ).emit()  # fmt: skip


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return buffers, and tensors that are plain attributes, by dotted name."""
    found = dict(model.named_buffers())
    for path, sub in model.named_modules():
        computed = computed_weights(sub)
        for key, value in vars(sub).items():
            if isinstance(value, Tensor) and key not in computed:
                found[f"{path}.{key}" if path else key] = value
    return found


class _Step(torch.autograd.Function):
    """The emitted forward and backward as one autograd node.

    The forward keeps saved values in a list, so that the backward can free each tensor after its
    last use. Autograd saves inputs, results and views of them: it detects in-place changes and
    handles reference cycles through this node.
    """

    @staticmethod
    def forward(fn: Any, code: Runnable, ctx: Context, *tensors: Tensor) -> tuple[Tensor, ...]:
        results = code.forward(ctx, list(tensors))
        count = 1 + len(code.buffers)
        (loss, *buffers), saved = results[:count], results[count:]
        ends = (loss if loss._base is None else loss.clone(), *buffers)  # for `loss /= 2`
        known = {id(tensor) for tensor in (*tensors, *ends)}
        private = [id(x) not in known and id(x._base) not in known for x in saved]
        fn.save_for_backward(*(x for x, own in zip(saved, private, strict=True) if not own))
        fn.kept = [x if own else None for x, own in zip(saved, private, strict=True)]
        fn.code, fn.rank_ctx, fn.training = code, ctx, ctx.training
        fn.mark_non_differentiable(*ends[1:])
        fn.set_materialize_grads(False)  # no zeros for the buffers
        return ends

    @staticmethod
    def backward(fn: Any, *grads: Tensor) -> Any:
        if torch.is_grad_enabled():
            raise PlanError(
                "a planned module has no second derivatives, which create_graph=True asks for",
                hint="compute them in the model's forward, and plan anew",
            )
        others = iter(fn.saved_tensors)  # raises at a second run without retain_graph
        saved = [next(others) if x is None else x for x in fn.kept]
        saved.append(grads[0])
        if not torch_private.keeps_graph():
            fn.kept = []
        ctx, now = fn.rank_ctx, fn.rank_ctx.training
        ctx.training = fn.training  # of the forward, whatever ran since
        try:
            with fn.code.as_planned(grads[0].device):
                results = apart(fn.code.backward(ctx, saved))
        finally:
            ctx.training = now
        places = fn.code.gradient_of
        return None, None, *(None if k is None else results[k] for k in places)
