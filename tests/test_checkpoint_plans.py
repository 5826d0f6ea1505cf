"""A checkpoint of any plan loads into any other, and training goes on as on one device."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch

from hap.errors import InputError
from hap.ir.plan import Plan
from hap.runtime.checkpoints.checkpoint_folder import CheckpointFolder, read_index
from hap.runtime.checkpoints.checkpoint_layout import layout, written_by
from hap.runtime.checkpoints.checkpoint_optimizer import take
from hap.runtime.checkpoints.checkpoint_shard import StoredShard
from hap.runtime.collectives import Comm
from hap.runtime.emulate import run_ranks
from hap.runtime.launch import spawn
from tests.checkpoint_runs import Averages, Run, data, make_scheduler, net, stage
from tests.random_plans import random_plan
from tests.test_two_axes import random_mesh_plan

STEPS = 3


def uneven(plan: Plan) -> set[str]:
    """Return the kinds of shards that the parameters of a plan have."""
    kinds = set()
    for given in plan.graph.role("parameter"):
        level = plan.levels(given.tensor, 0)[-1]
        if level is None:
            kinds.add("whole")
            continue
        kinds |= {"unlike"} if len(set(level.sizes)) > 1 else set()
        kinds |= {"empty"} if 0 in level.sizes else set()
        kinds.add(f"dim {level.dim}")
    return kinds


def test_states_in_dicts_and_lists_are_cut_as_their_parameters() -> None:
    plan = random_plan(net(), 4, 1)

    def states(flat: bool, comm: Comm) -> dict[str, StoredShard]:
        run = Run(plan, comm)
        run.optimizer = Averages(run.module.parameters(), lr=0.05, flat=flat)
        run.scheduler = make_scheduler(run.optimizer)
        run.train(0, 1)
        return take(run.optimizer, run.module, layout(run.module).parameters)[0]

    for key in ("momenta[0.9]/up.weight", "momenta[0.5][0]/up.weight"):
        parts = [s[f"optimizer/{key}"] for s in run_ranks(4, partial(states, False))]
        assert len({(p.offsets, p.tensor.shape) for p in parts}) > 1
        assert sum(p.tensor.numel() for p in parts if p.written) == 20 * 8
    with pytest.raises(InputError, match=r"state 'flat' of .* this rank's part of the parameter"):
        run_ranks(4, partial(states, True))


@pytest.mark.slow
@pytest.mark.gloo
def test_four_ranks_three_two_axes_and_one_process(tmp_path: Path) -> None:
    """Compare losses, weights, buffers and optimizer states with training on one device."""
    case = net()
    four, three = (random_plan(case, n, seed) for n, seed in ((4, 1), (3, 2)))
    mesh = random_mesh_plan(case, 2, 2, 0)
    assert {"whole", "unlike", "empty", "dim 0", "dim 1"} <= uneven(four) | uneven(three)
    stored = [n for plan in (four, three) for n in plan.program.used_axes() if "stored" in n]
    assert stored, "no plan shards storage alone, as ZeRO does"
    reference = Run(None)
    folder = str(tmp_path / "checkpoints")

    def follows(start: int, losses: list[float]) -> None:
        want = reference.train(start, start + len(losses))
        assert losses == pytest.approx(want, abs=1e-9, rel=1e-9)

    def trained(plan: Plan) -> None:
        ranks = spawn(stage, plan.world_size, args=(plan.to_json(), folder, STEPS), timeout_s=240)
        for start, losses in ranks[1:]:
            assert (start, losses) == (ranks[0][0], pytest.approx(ranks[0][1], rel=1e-9))
        follows(*ranks[0])

    trained(four)
    trained(three)
    trained(mesh)
    plain = Run(None, shift=1.0)
    start = plain.load(folder).step
    assert start == 3 * STEPS
    same_state(plain, reference)
    follows(start, plain.train(start, start + STEPS))
    plain.save(folder, start + STEPS, keep=2, block=True)
    assert CheckpointFolder(folder).steps() == [3 * STEPS, 4 * STEPS]
    last = Run(None, shift=1.0)
    last.load(folder)
    same_state(last, reference)


def same_state(run: Run, reference: Run) -> None:
    own, want = run.module.state_dict(), reference.module.state_dict()
    assert list(own) == list(want)
    hidden = {"hidden": run.module.hidden}, {"hidden": reference.module.hidden}
    for found, expected in ((own, want), hidden):
        for name, value in found.items():
            torch.testing.assert_close(value, expected[name], rtol=1e-9, atol=1e-9, msg=name)
    for mine, other in zip(run.module.parameters(), reference.module.parameters(), strict=True):
        states, others = run.optimizer.state[mine], reference.optimizer.state[other]
        assert states.keys() == others.keys()
        for key, value in states.items():
            torch.testing.assert_close(value, others[key], rtol=1e-9, atol=1e-9, msg=key)
    for group, other_group in zip(
        run.optimizer.param_groups, reference.optimizer.param_groups, strict=True
    ):
        assert {k: v for k, v in group.items() if k != "params"} == {
            k: v for k, v in other_group.items() if k != "params"
        }
    assert run.scheduler.state_dict() == reference.scheduler.state_dict()


@pytest.mark.parametrize("seed", range(4))
def test_every_element_is_written_once(seed: int) -> None:
    """By random plans over one axis and two."""
    for plan in (random_plan(net(), 4, seed), random_mesh_plan(net(), 2, 3, seed)):
        tensors = [i.tensor for i in plan.graph.inputs if i.role in ("parameter", "buffer")]
        writes = [written_by(plan, tensors, rank) for rank in range(plan.world_size)]
        for tensor in tensors:
            shape = plan.graph.tensors[tensor].shape
            count = torch.zeros(shape, dtype=torch.int64)
            for rank in range(plan.world_size):
                if tensor in writes[rank]:
                    block = count
                    for level in plan.levels(tensor, rank):
                        if level:
                            block = block.narrow(level.dim, level.start, level.sizes[level.place])
                    block += 1
            assert (count == 1).all(), (tensor, count)


def test_one_plan_of_one_rank(tmp_path: Path) -> None:
    plan = random_plan(net(), 1, 0)
    run, reference = Run(plan), Run(None)
    first = run.train(0, 3)
    run.save(tmp_path, 3)
    other = Run(plan, shift=2.0)
    run.train(3, 4)  # beside the save
    assert run.load(tmp_path).step == 3
    assert other.load(tmp_path).step == 3
    losses = first + other.train(3, 6)
    assert losses == pytest.approx(reference.train(0, 6), abs=1e-9)
    assert run.train(3, 6) == pytest.approx(losses[3:], abs=1e-9)
    assert data(0).shape == (12, 5)
    assert read_index(tmp_path / "step-3")["batch_size"] == 12
