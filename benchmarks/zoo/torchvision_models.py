"""Models of torchvision: one row each."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import nn

from benchmarks.zoo.entry import Entry
from benchmarks.zoo.packages import package, packaged


def _make(where: str, name: str, **options: Any) -> nn.Module:
    models = package("torchvision").models
    if where == "segmentation":
        options["weights_backbone"] = None
    model: nn.Module = getattr(getattr(models, where) if where else models, name)(**options)
    for module in model.modules():
        if type(module).__name__ == "StochasticDepth":
            module.p = 0.0  # no layers left out by chance: no two masks agree
    return model


def _row(
    name: str, brings: str, tiny: int = 64, full: int = 224, where: str = "", frames: int = 0,
    rows: tuple[int, int] = (6, 64), both: dict[str, Any] | None = None,
    published: dict[str, Any] | None = None, **options: Any,
) -> Entry:  # fmt: skip
    lead = ((3, frames), (3, frames)) if frames else ((3,), (3,))
    shapes = (*lead[0], tiny, tiny), (*lead[1], full, full)
    pixels = where == "segmentation"
    return packaged(
        "torchvision", f"torchvision/{name}", brings, partial(_make, where, name), options,
        shapes, rows, pixels=pixels, both=both, published=published,
        classes=21 if pixels else 400 if frames else 1000,
    )  # fmt: skip


_VIT_B_16 = {
    "image_size": 224, "patch_size": 16, "num_layers": 12, "num_heads": 12, "hidden_dim": 768,
    "mlp_dim": 3072,
}  # fmt: skip
_TINY_VIT = {
    "image_size": 32, "patch_size": 8, "num_layers": 2, "num_heads": 4, "hidden_dim": 24,
    "mlp_dim": 40,
}  # fmt: skip

TORCHVISION = (
    _row("alexnet", "large fully connected layers with dropout"),
    _row("squeezenet1_1", "fire modules, a convolution as the head"),
    _row("shufflenet_v2_x0_5", "channels shuffled"),
    _row("mobilenet_v2", "inverted bottlenecks, ReLU6"),
    _row("mobilenet_v3_small", "hard sigmoid gates"),
    _row("mnasnet0_5", "a searched network"),
    _row("googlenet", "inception modules, two auxiliary losses", 64, both={"init_weights": True}),
    _row("resnet18", "batch norm, shortcuts"),
    _row("resnext50_32x4d", "groups of convolutions"),
    _row("densenet121", "every layer reads all before it", 32),
    _row("regnet_x_400mf", "widths by a rule"),
    _row("efficientnet_b0", "squeeze and excitation, SiLU"),
    _row("efficientnet_v2_s", "fused inverted bottlenecks", 64, 384),
    _row("convnext_tiny", "layer norm over channels", 32),
    _row("swin_t", "shifted windows", 56),
    _row("maxvit_t", "windows and grids", 224, rows=(4, 64)),
    _row("VisionTransformer", "nn.MultiheadAttention", 32, published=_VIT_B_16, **_TINY_VIT),
    _row("fcn_resnet50", "a class per pixel, dilation", 32, 224, "segmentation", rows=(5, 32)),
    _row("deeplabv3_mobilenet_v3_large", "pooling at several rates", 64, 224, "segmentation",
         rows=(5, 32)),
    _row("lraspp_mobilenet_v3_large", "a gate of the whole image", 64, 224, "segmentation",
         rows=(5, 32)),
    _row("r3d_18", "convolutions over time", 32, 112, "video", 16, (5, 32)),
    _row("mc3_18", "convolutions over time, then not", 32, 112, "video", 16, (5, 32)),
)  # fmt: skip
