"""Models of images run torch's kernels, and train as on one device under random plans."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hap.capture.tracing import capture
from hap.ir.graph import Graph
from hap.rule_sources import with_rules
from hap.synthesizer.rules.textual_rules import rule_origin
from tests.random_plans import make_case, random_plan, verdict

RESIZED: dict[str, Callable[[Tensor], Tensor]] = {
    mode: lambda x, mode=mode: F.interpolate(x, size=(9, 5), mode=mode)  # type: ignore[misc]
    for mode in ("nearest", "nearest-exact", "bilinear", "bicubic")
} | {
    "bilinear, smoothed": lambda x: F.interpolate(x, (3, 5), mode="bilinear", antialias=True),
    "trilinear": lambda x: F.interpolate(x[:, :, None], scale_factor=2, mode="trilinear"),
    "linear": lambda x: F.interpolate(x.flatten(2), size=11, mode="linear"),
}
OTHERS: dict[str, Callable[[Tensor], Tensor]] = {
    "largest of regions": lambda x: F.adaptive_max_pool2d(x, 3),
    "largest of volumes": lambda x: F.max_pool3d(x[:, None], 2),
    "means of volumes": lambda x: F.adaptive_avg_pool3d(x[:, None], (2, 3, 3)),
    "at points": lambda x: F.grid_sample(
        x, x[:, :2].permute(0, 2, 3, 1).tanh(), align_corners=False
    ),
    "groups": lambda x: F.group_norm(x, 3),
    "windows": lambda x: x.unfold(2, 3, 2),
    "diagonal": lambda x: x.diagonal(0, 2, 3),
}


class Filtered(nn.Module):
    """A convolution, and what each of the functions makes of its results."""

    def __init__(self, functions: Iterable[Callable[[Tensor], Tensor]]) -> None:
        super().__init__()
        self.functions = tuple(functions)
        self.filter = nn.Conv2d(3, 6, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.filter(x)
        return sum(each(x).square().mean() for each in self.functions)  # type: ignore[return-value]


def verified(model: nn.Module, batch: object) -> Graph:
    """Return the graph of a model, after random plans of it have been verified."""
    graph = with_rules(capture(model, batch), {})
    case = make_case(model, batch, graph=graph)
    for world in (2, 3):
        assert verdict(case, random_plan(case, world, 0)).ok
    return graph


@pytest.mark.slow
def test_a_resized_image_has_one_kernel_each_way() -> None:
    torch.manual_seed(0)
    graph = verified(Filtered(RESIZED.values()), torch.randn(6, 3, 6, 7))
    kernels = [node.op for node in graph.nodes if "upsample" in node.op]
    assert len(kernels) == 2 * len(RESIZED)
    assert len({*kernels}) == len(kernels), "each way is a kernel of its own"
    assert not any("index" in node.op for node in graph.nodes)


@pytest.mark.slow
@pytest.mark.parametrize(
    "names",
    [
        ("largest of regions", "at points", "windows", "diagonal"),
        ("largest of volumes", "means of volumes", "groups"),
    ],
    ids=", ".join,
)
def test_functions_of_images_are_split(names: tuple[str, ...]) -> None:
    torch.manual_seed(0)
    graph = verified(Filtered(OTHERS[name] for name in names), torch.randn(6, 3, 7, 7))
    assert not any(rule_origin(lines) == "replicated" for lines in graph.rules.values())


class Labelled(nn.Module):
    """Cross-entropy per pixel, with the classes in dim 1, or stored last."""

    def __init__(self, smoothing: float, weighted: bool, last: bool) -> None:
        super().__init__()
        self.scores = nn.Conv2d(3, 5, 1)
        self.smoothing, self.last = smoothing, last
        self.register_buffer("weight", torch.arange(1.0, 6.0) if weighted else None)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        scores = self.scores(x)
        if self.last:
            scores = scores.contiguous(memory_format=torch.channels_last)
        return F.cross_entropy(
            scores, labels, self.weight, ignore_index=2, label_smoothing=self.smoothing
        )


@pytest.mark.parametrize(
    "smoothing, weighted, last",
    [(0.0, False, False), (0.1, False, False), (0.0, True, False), (0.0, False, True)],
)
def test_the_classes_of_pixels_are_not_moved(smoothing: float, weighted: bool, last: bool) -> None:
    torch.manual_seed(0)
    batch = torch.randn(6, 3, 4, 7), torch.randint(5, (6, 4, 7))
    graph = verified(Labelled(smoothing, weighted, last), batch)
    operators = {node.op for node in graph.nodes}
    assert ("hap.cross_entropy.default" in operators) == last
    assert ("aten._log_softmax.default" in operators) != last


@pytest.mark.parametrize("lone", [False, True])
def test_classes_that_are_stored_apart(lone: bool) -> None:
    class Apart(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scores = nn.Linear(4, 10)

        def forward(self, x: Tensor, labels: Tensor) -> Tensor:
            scores = self.scores(x)[:, ::2]
            return F.cross_entropy(*((scores[0], labels[0]) if lone else (scores, labels)))

    torch.manual_seed(0)
    graph = verified(Apart(), (torch.randn(6, 4), torch.randint(5, (6,))))
    assert "hap.cross_entropy.default" not in {node.op for node in graph.nodes}
