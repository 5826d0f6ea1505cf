"""Automatic mixed precision, requested in the plan or in the module's own forward."""

from __future__ import annotations

import copy
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hap
from hap.capture.fake_batch import fake_batch
from hap.capture.model_file import load_model_file
from hap.capture.tracing import capture
from hap.errors import InputError, ModelError
from hap.ir.batch import call
from hap.ir.graph import Graph
from hap.ir.linear_layers import LINEAR
from hap.ir.plan import Plan
from hap.runtime.collectives import Comm
from hap.runtime.emulate import run_ranks
from hap.runtime.hap_module import HapModule
from tests.random_plans import Case, make_case, random_plan, two_machines, verdict

PLANS = ((2, 0), (3, 1), (5, 2))


class Attention(nn.Module):
    """Products, attention, layer and batch norms and a loss, optionally under its own autocast."""

    def __init__(self, device: str = "", dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.embed, self.qkv = nn.Embedding(13, 12), nn.Linear(12, 36)
        self.norm, self.batch_norm = nn.LayerNorm(12), nn.BatchNorm1d(12)
        self.head = nn.Linear(12, 13)
        self.device, self.dtype = device, dtype

    def forward(self, x: Tensor) -> Tensor:
        if not self.device:
            return self.run(x)
        with torch.autocast(self.device, self.dtype):
            return self.run(x)

    def run(self, x: Tensor) -> Tensor:
        h = self.norm(self.embed(x))
        q, k, v = self.qkv(h).view(*x.shape, 3, 3, 4).permute(2, 0, 3, 1, 4)
        h = h + F.scaled_dot_product_attention(q * 1.5, k, v).transpose(1, 2).flatten(2)
        h = self.batch_norm(h.transpose(1, 2)).transpose(1, 2)
        return F.cross_entropy(self.head(h).flatten(0, 1), x.flatten())


def words() -> Tensor:
    return torch.randint(13, (7, 5), generator=torch.Generator().manual_seed(4))


def products(graph: Graph) -> set[str]:
    names = ("aten.mm", "aten.addmm", "aten.bmm", "hap.sdpa")
    return {
        graph.tensors[o].dtype
        for n in graph.nodes if n.op.startswith(names) for o in n.outputs[:1] if o
    }  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("device", ["", "cpu", "cuda"])
def test_products_are_in_half_precision_and_parameters_are_not(device: str, dtype: str) -> None:
    """The plan requests autocast, or the forward requests it for the CPU or for CUDA."""
    graph = half_case(device, dtype).graph
    assert products(graph) == {dtype}
    assert {graph.tensors[o].dtype for o in graph.gradients.values()} == {"float32"}
    assert graph.tensors[graph.loss].dtype == "float32"
    assert products(single_precision()) == {"float32"}


@pytest.mark.slow
@pytest.mark.parametrize("device", ["", "cpu"])
def test_programs_are_right_in_float64(device: str) -> None:
    """All floats are float64, as in verification."""
    case = half_case(device)
    for world, seed in PLANS:
        found = verdict(case, random_plan(case, world, seed))
        wrong = [(row.what, row.tensor, row.error) for row in found.rows if not row.ok]
        assert found.ok, (world, seed, wrong[:4])


@cache
def single_precision() -> Graph:
    return capture(Attention(), words())


@cache
def half_case(device: str = "", dtype: str = "bfloat16") -> Case:
    torch.manual_seed(0)
    model = Attention(device, getattr(torch, dtype) if device else None)
    return make_case(
        model, words(), graph=capture(model, words(), autocast="" if device else dtype)
    )


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("kind", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_half_precision_is_really_run(kind: str, dtype: str) -> None:
    """Results match torch's autocast within the dtype's precision, and differ from float32."""
    case, device = half_case(dtype=dtype), torch.device(kind)
    reference = copy.deepcopy(case.model).to(device)
    with torch.autocast(kind, getattr(torch, dtype)):
        want = reference(words().to(device))
    want.backward()
    exact = copy.deepcopy(case.model).to(device)
    exact(words().to(device)).backward()

    def act(comm: Comm) -> tuple[float, dict[str, Tensor]]:
        module = HapModule(plan, case.model, comm, device)
        loss = call(module, plan.local_batch(words(), comm.rank))
        loss.backward()
        return loss.item(), {n: p.grad for n, p in module.named_parameters() if p.grad is not None}

    for world, seed in PLANS:
        plan = random_plan(case, world, seed)
        ranks = run_ranks(world, act)
        assert [loss for loss, _ in ranks] == pytest.approx([want.item()] * world, rel=1e-2)
        tensors = {i.target: i.tensor for i in plan.graph.role("parameter")}
        for name in ("qkv.weight", "head.weight", "norm.weight"):
            placement = plan.program.inputs[tensors[name]]
            parts = [grads[name] for _, grads in ranks]
            found = torch.cat(parts, placement.dim) if placement.sharded else parts[0]
            true = reference.get_parameter(name).grad
            whole = exact.get_parameter(name).grad
            assert true is not None and whole is not None
            assert found.dtype == torch.float32
            assert (found - true).norm() < 0.05 * true.norm(), name
            assert (found - whole).norm() > 1e-5 * whole.norm(), "this ran in float32"


@pytest.mark.slow
def test_prices_know_the_dtypes() -> None:
    """Half precision halves the bytes and has the rate of the half-precision units."""
    from hap.synthesizer.cost.operator_work import node_work

    def bytes_of_products(graph: Graph) -> float:
        return sum(node_work(n, graph).bytes for n in graph.nodes if n.op == LINEAR)

    single, half = single_precision(), half_case().graph
    assert bytes_of_products(half) == pytest.approx(bytes_of_products(single) / 2)
    dtypes = {node_work(n, half).dtype for n in half.nodes if n.op == LINEAR}
    assert dtypes == {"bfloat16"}


FILE = """
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(12, 24), nn.GELU(), nn.Linear(24, 5))

    def forward(self, x, y):
        return nn.functional.cross_entropy(self.layers(x), y)


def model():
    return Net()


def batch():
    return torch.randn(16, 12), torch.randint(5, (16,))


def optimizer(named_parameters):
    groups = {True: [], False: []}
    for name, parameter in named_parameters:
        groups[name.endswith("bias")].append(parameter)
    return torch.optim.AdamW(
        [{"params": groups[True], "weight_decay": 0.0}, {"params": groups[False]}], lr=1e-2
    )

"""


def written(tmp_path: Path, line: str) -> Path:
    path = tmp_path / "net.py"
    path.write_text(FILE + line)
    return path


@pytest.mark.slow
@pytest.mark.parametrize("value", ['"bfloat16"', "torch.float16"])
def test_a_model_file_says_it_with_a_name(tmp_path: Path, value: str) -> None:
    path = written(tmp_path, f"autocast = {value}\n")
    plan = hap.api.plan_file(str(path), two_machines(2))
    dtype = value.strip('"').removeprefix("torch.")
    assert plan.recipe.autocast == dtype
    assert products(plan.graph) == {dtype}
    plan.save(tmp_path / "plan.json")
    again = Plan.load(tmp_path / "plan.json")
    assert again.recipe == plan.recipe
    assert hap.verify(again, load_model_file(str(path))).ok
    file = load_model_file(str(path))
    again.check_model(capture(file.model(), fake_batch(again), autocast=again.recipe.autocast))
    torch.manual_seed(0)
    model = file.model()
    losses = run_ranks(2, lambda comm: trained(again, file, copy.deepcopy(model), comm))
    assert losses[0] == losses[1]
    assert losses[0][-1] < losses[0][0]


def trained(plan: Plan, file: Any, model: nn.Module, comm: Comm) -> list[float]:
    """Return the losses of eight steps, made as ``hap run`` makes them."""
    from hap.capture.user_optimizer import make_optimizer

    module = hap.compile(model, plan, comm=comm, check=False)
    scaler = hap.GradScaler(module, init_scale=256.0)
    optimizer = make_optimizer(file.optimizer, module)
    generator = torch.Generator().manual_seed(0)
    batch = torch.randn(16, 12, generator=generator), torch.randint(5, (16,), generator=generator)
    losses = []
    for _ in range(8):
        optimizer.zero_grad()
        loss = call(module, plan.local_batch(batch, comm.rank))
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
    return losses


@pytest.mark.slow
def test_another_precision_is_another_program(tmp_path: Path) -> None:
    plan = hap.plan(Attention(), words(), two_machines(2), autocast="bfloat16")
    plan.check_model(half_case().graph)
    with pytest.raises(InputError, match="not the one that was planned"):
        plan.check_model(single_precision())


def test_unknown_dtypes_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="autocast 'int8'"):
        hap.plan(Attention(), words(), two_machines(2), autocast="int8")
    with pytest.raises(ModelError, match=r"`autocast` is torch.float32"):
        load_model_file(str(written(tmp_path, "autocast = torch.float32\n")))
