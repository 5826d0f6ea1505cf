"""Rules of images and volumes: pools, other sizes, and values at points between the pixels."""

from __future__ import annotations

from hap.ir.image_operators import ADAPTIVE_MAX_POOLS, MAX_POOLS, POOLS, RESIZES, image_dims
from hap.synthesizer.rules.rule_table import Call, Letters, Row, equation, letters, rule


def _planes(call: Call) -> list[str | None]:
    """Return a letter for each dim but those of the image: each is computed alone."""
    rank = len(call.out.shape)
    return letters(call.out, fixed=range(rank - image_dims(call.node.op), rank))


@rule(*(f"aten.{op}.default" for op in (*MAX_POOLS, *ADAPTIVE_MAX_POOLS, *POOLS, *RESIZES)))
def _resized(call: Call) -> list[Row]:
    planes, linear = _planes(call), [] if "max" in call.node.op else [{0}]
    return equation(call, [planes], [planes for _ in call.node.outputs], linear=linear)


@rule(*(f"aten.{op}_backward.default" for op in (*MAX_POOLS, *ADAPTIVE_MAX_POOLS, *RESIZES)))
def _resized_backward(call: Call) -> list[Row]:
    return equation(call, [_planes(call) for _ in call.ins], [_planes(call)], linear=[{0}])


@rule(*(f"aten.{op}_backward.default" for op in POOLS))
def _avg_pool_backward(call: Call) -> list[Row]:
    # The pool's input only provides its shape; the pool, being linear, may have left it partial.
    planes, linear = _planes(call), [{0}, {1}, {0, 1}]
    return equation(call, [planes, planes], [planes], linear=linear, depends=[{0}])


def _sampled(call: Call) -> tuple[Letters, Letters, Letters]:
    """Return letters of the images, of the points, and of the images' values at the points."""
    points = "hw" if "2d" in call.node.op else "dhw"
    return ["b", "c", *(None for _ in points)], ["b", *points, None], ["b", "c", *points]


@rule("aten.grid_sampler_2d.default", "aten.grid_sampler_3d.default")
def _grid_sampler(call: Call) -> list[Row]:
    images, points, values = _sampled(call)
    return equation(call, [images, points], [values], linear=[{0}])


@rule("aten.grid_sampler_2d_backward.default", "aten.grid_sampler_3d_backward.default")
def _grid_sampler_backward(call: Call) -> list[Row]:
    images, points, values = _sampled(call)
    return equation(
        call, [values, images, points], [images, points], linear=[{0}, {1}],
        depends=[{0, 2}, {0, 1, 2}],
    )  # fmt: skip
