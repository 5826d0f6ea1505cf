"""The benchmark models keep the contract of a model file, and the tiny ones train."""

import itertools
from importlib import import_module
from pathlib import Path

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from benchmarks.models import bert, bert_moe, gpt2

FOLDER = Path(bert.__file__).parent
TINY = ("tiny", "tiny_dropout")
VARIANTS = {
    "bert": (*TINY, "small", "batch_64", "batch_1024", "layers_24", "layers_48"),
    "bert_moe": TINY,
    "gpt2": (*TINY, "small"),
    "llama": (*TINY, "tiny_gqa", "llama_7b", "llama_3_8b", "batch_64"),
    "mlp": TINY,
    "segmenter": TINY,
    "t5": TINY,
    "vgg19": TINY,
    "vit": (*TINY, "batch_64"),
    "wide_mlp": TINY,
}
ATTENTION = 4 * (768 * 768 + 768)
FFN = 768 * 3072 + 3072 + 3072 * 768 + 768
NORM = 2 * 768
EXPERTS = 768 * 16 + 16 * 2 * 768 * 3072  # the router and 16 experts, without biases
WORDS, POSITIONS = 30522 * 768, 128 * 768
LAYER = ATTENTION + FFN + 2 * NORM
WIDTHS = (64, 64, 128, 256, 512)
STEM = 3 * 64 * 9 + 2 * 64


def block(width_in, width):
    return (width_in + width) * width * 9 + width_in * width + 3 * 2 * width


PARAMETERS = {  # of the full sizes, counted by hand or published
    "bert": WORDS + POSITIONS + 2 * 768 + 12 * LAYER + 768 * 768 + 768 + 2 * NORM + 30522,
    "bert_moe": WORDS + POSITIONS + NORM + 6 * LAYER + 6 * (LAYER - FFN + EXPERTS) + 30522,
    "gpt2": 124_439_808 - 896 * 768,  # published, less the positions above 128
    "llama": 6_738_415_616,  # published
    "mlp": 1024 * 4096 + 4096 + 4 * (4096 * 4096 + 4096) + 4096 * 1024 + 1024,
    "segmenter": STEM + sum(map(block, WIDTHS, WIDTHS[1:])) + 512 * 21 + 21,
    "t5": 222_903_552,  # published
    "vgg19": 143_667_240 - 990 * 4097,  # published for 1,000 classes, less 990 of them
    "vit": 48 * 768 + 768 + 66 * 768 + 12 * LAYER + NORM + 7690,  # 65 positions, a class token
    "wide_mlp": 2 * (1024 * 1024 + 1024) + 1024 * 32768 + 32768,
}
ALL = [(file, name) for file, names in VARIANTS.items() for name in ("model", *names)]
TRAINED = [(file, name) for file, name in ALL if name.startswith("tiny")]


def part(file, variant, name):
    """Return ``name`` of the variant, else of the file, else None, as the command line does."""
    module = import_module(f"benchmarks.models.{file}")
    prefix = "" if variant == "model" else f"{variant}_"
    return getattr(module, prefix + name, None) or getattr(module, name, None)


def make(file, variant):
    module = import_module(f"benchmarks.models.{file}")
    return getattr(module, variant)(), part(file, variant, "batch")()


def run(file, variant, net, batch):
    """Return the scalar loss of one batch."""
    if isinstance(batch, dict):
        output = net(**batch)
    else:
        output = net(*batch) if isinstance(batch, tuple) else net(batch)
    loss = part(file, variant, "loss")
    if loss is not None:
        return loss(output, batch)
    return output if isinstance(output, torch.Tensor) else output.loss


def tensors(batch):
    if isinstance(batch, torch.Tensor):
        return [batch]
    return list(batch.values() if isinstance(batch, dict) else batch)


def test_no_file_is_left_out():
    files = {path.stem for path in FOLDER.glob("*.py")} - {"__init__"}
    assert files == set(VARIANTS) == set(PARAMETERS)


@pytest.mark.parametrize(("file", "variant"), ALL)
def test_contract_holds_without_memory_for_weights(file, variant):
    with FakeTensorMode():
        net, batch = make(file, variant)
        loss = run(file, variant, net, batch)
    assert isinstance(net, nn.Module)
    assert net.training
    assert len({tensor.shape[0] for tensor in tensors(batch)}) == 1, "one batch size"
    assert loss.shape == ()
    assert loss.requires_grad
    if variant == "model":
        assert sum(p.numel() for p in net.parameters()) == PARAMETERS[file]


@pytest.mark.parametrize(("file", "variant"), TRAINED)
def test_tiny_variants_train(file, variant):
    torch.manual_seed(0)
    net, batch = make(file, variant)
    optimizer = (part(file, variant, "optimizer") or torch.optim.Adam)(net.parameters())
    losses = []
    for _ in range(12):
        optimizer.zero_grad()
        loss = run(file, variant, net, batch)
        loss.backward()
        unused = [name for name, p in net.named_parameters() if p.grad is None]
        assert unused == []
        optimizer.step()
        losses.append(loss.item())
    assert torch.isfinite(torch.tensor(losses)).all()
    assert sum(losses[-3:]) / 3 < losses[0] - 0.01, losses


@pytest.mark.parametrize("file", VARIANTS)
def test_dropout_is_on_only_where_the_name_says_so(file):
    for variant in TINY:
        torch.manual_seed(0)
        net, batch = make(file, variant)
        with torch.no_grad():
            first, second = (run(file, variant, net, batch) for _ in range(2))
        assert torch.equal(first, second) == (variant == "tiny")


@pytest.mark.parametrize("module", [bert, gpt2])
def test_text_batches_are_the_same_in_every_process(module):
    ours, theirs = (list(itertools.islice(module.small_batches(), 3)) for _ in range(2))
    for mine, other in zip(ours, theirs, strict=True):
        assert {key: value.shape for key, value in mine.items()} == {
            "input_ids": (32, 64),
            "labels": (32, 64),
        }
        assert all(torch.equal(mine[key], other[key]) for key in mine)
        assert mine["input_ids"].min() >= 0
        assert mine["input_ids"].max() < 4096
    assert not torch.equal(ours[0]["input_ids"], ours[1]["input_ids"])


def test_masked_language_model_asks_only_for_what_it_hides():
    first = next(bert.small_batches())
    hidden = first["input_ids"] == bert.MASK
    assert torch.equal(hidden, first["labels"] != bert.IGNORED)
    assert 0.1 < hidden.float().mean() < 0.2
    assert (first["labels"][hidden] > 0).all()


def test_experts_equal_a_loop_over_tokens():
    """With room for every token, the einsums equal a loop over tokens and their two experts."""
    torch.manual_seed(0)
    moe = bert_moe.MixtureOfExperts(hidden=8, ffn=12, experts=5, capacity_factor=5.0)
    x = torch.randn(3, 7, 8)
    want = torch.zeros_like(x)
    for b, s in itertools.product(range(3), range(7)):
        gates, chosen = moe.router(x[b, s]).softmax(-1).topk(2)
        for gate, e in zip(gates / gates.sum(), chosen, strict=True):
            inner = nn.functional.gelu(x[b, s] @ moe.up[e])
            want[b, s] += gate * (inner @ moe.down[e])
    torch.testing.assert_close(moe(x)[0], want)


def test_full_experts_turn_tokens_away():
    torch.manual_seed(0)
    logits = torch.randn(4, 16, 3) + torch.tensor([3.0, 0.0, 0.0])  # most choose expert 0
    combine, balance = bert_moe.top2_gating(logits, capacity=4)
    placed = combine > 0
    assert (placed.sum(1) <= 1).all(), "a place holds one token"
    assert (placed.sum((2, 3)) <= 2).all(), "a token has two experts"
    assert (placed[:, :, 0].sum((1, 2)) == 4).all(), "the wanted expert is full"
    firsts = (logits.argmax(-1) == 0) & (torch.cumsum(logits.argmax(-1) == 0, 1) <= 4)
    assert torch.equal(placed[:, :, 0].any(-1), firsts), "served in order, first choices first"
    even, _ = bert_moe.top2_gating(torch.zeros(4, 16, 3), capacity=64)
    assert balance > 1.2
    torch.testing.assert_close(even.sum((2, 3)), torch.ones(4, 16))
