"""Models of torchvision: one row each.

A tiny model has the options of its row; where a model's own function fixes its blocks, ``small``
makes an instance of the same class.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

from torch import nn

from benchmarks.zoo.entry import Entry
from benchmarks.zoo.optional import package
from benchmarks.zoo.packages import CLASSES, packaged

Small = Callable[[ModuleType], nn.Module]
"""``torchvision.models`` -> a tiny model."""


def _make(where: str, name: str, small: Small | None = None, **options: Any) -> nn.Module:
    models = package("torchvision").models
    if small:
        return small(models)
    if where == "segmentation":
        options["weights_backbone"] = None
    model: nn.Module = getattr(getattr(models, where) if where else models, name)(**options)
    return model


def _row(
    name: str, brings: str, tiny: int = 64, full: int = 224, where: str = "", frames: int = 0,
    rows: tuple[int, int] = (6, 64), both: dict[str, Any] | None = None,
    published: dict[str, Any] | None = None, small: Small | None = None, **options: Any,
) -> Entry:  # fmt: skip
    lead = ((3, min(frames, 4)), (3, frames)) if frames else ((3,), (3,))
    shapes = (*lead[0], tiny, tiny), (*lead[1], full, full)
    pixels = where == "segmentation"
    options |= {"small": small} if small else {}
    return packaged(
        "torchvision", f"torchvision/{name}", brings, partial(_make, where, name), options,
        shapes, rows, pixels=pixels, both=both, published=published,
        classes=21 if pixels else 400 if frames else 1000,
    )  # fmt: skip


def _of_class(path: str, *arguments: Any, **options: Any) -> Small:
    *modules, name = path.split(".")

    def small(m: ModuleType) -> nn.Module:
        where: Any = m
        for module in modules:
            where = getattr(where, module)
        model: nn.Module = getattr(where, name)(*arguments, num_classes=CLASSES, **options)
        return model

    return small


def _residual(block: str, **options: Any) -> Small:
    def small(m: ModuleType) -> nn.Module:
        model: nn.Module = m.ResNet(
            getattr(m.resnet, block), [1, 1, 1, 1], num_classes=CLASSES, **options
        )
        return model

    return small


def _blocks_of_widths(m: ModuleType) -> nn.Module:
    blocks = m.regnet.BlockParams([1, 1], [8, 16], [8, 8], [1.0, 1.0], [2, 2])
    model: nn.Module = m.RegNet(blocks, num_classes=CLASSES, stem_width=8)
    return model


def _inverted(m: ModuleType) -> nn.Module:
    block = m.efficientnet.MBConvConfig
    stages = [block(1, 3, 1, 8, 8, 1), block(4, 5, 2, 8, 16, 2)]
    model: nn.Module = m.EfficientNet(stages, 0.2, num_classes=CLASSES)
    return model


def _fused(m: ModuleType) -> nn.Module:
    fused, block = m.efficientnet.FusedMBConvConfig, m.efficientnet.MBConvConfig
    stages = [fused(1, 3, 1, 8, 8, 1), fused(4, 3, 2, 8, 16, 1), block(4, 3, 2, 16, 24, 2)]
    model: nn.Module = m.EfficientNet(stages, 0.2, num_classes=CLASSES, last_channel=32)
    return model


def _gated(m: ModuleType) -> nn.Module:
    block = m.mobilenetv3.InvertedResidualConfig
    stages = [block(8, 3, 8, 8, True, "RE", 2, 1, 1.0), block(8, 5, 24, 16, True, "HS", 2, 1, 1.0)]
    model: nn.Module = m.MobileNetV3(stages, 32, num_classes=CLASSES)
    return model


def _scaled(m: ModuleType) -> nn.Module:
    block = m.convnext.CNBlockConfig
    stages = [block(8, 16, 1), block(16, 24, 1), block(24, None, 1)]
    model: nn.Module = m.ConvNeXt(stages, 0.1, num_classes=CLASSES)
    return model


def _pooled(m: ModuleType) -> nn.Module:
    block = m.video.mvit.MSBlockConfig
    none, half, kernel = [1, 1, 1], [1, 2, 2], [3, 3, 3]
    stages = [
        block(1, 8, 16, kernel, kernel, none, half), block(2, 16, 16, kernel, kernel, half, none)
    ]  # fmt: skip
    model: nn.Module = m.video.MViT(
        (32, 32), 4, stages, residual_pool=False, residual_with_cls_embed=True,
        rel_pos_embed=False, proj_after_attn=False, num_classes=CLASSES,
    )  # fmt: skip
    return model


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
    _row("shufflenet_v2_x0_5", "channels shuffled", small=_of_class(
        "ShuffleNetV2", [1, 2, 1], [8, 16, 24, 32, 40])),
    _row("mobilenet_v2", "inverted bottlenecks, ReLU6", width_mult=0.25,
         inverted_residual_setting=[[1, 16, 1, 1], [4, 32, 2, 2]]),
    _row("mobilenet_v3_small", "hard sigmoid gates", small=_gated),
    _row("mnasnet0_5", "a searched network"),
    _row("googlenet", "inception modules, two auxiliary losses", 64, both={"init_weights": True}),
    _row("resnet18", "batch norm, shortcuts", small=_residual("BasicBlock")),
    _row("resnext50_32x4d", "groups of convolutions", small=_residual(
        "Bottleneck", groups=4, width_per_group=8)),
    _row("wide_resnet50_2", "bottlenecks twice as wide", small=_residual(
        "Bottleneck", width_per_group=16)),
    _row("densenet121", "every layer reads all before it", small=_of_class(
        "DenseNet", 4, (2, 2), 8, 2)),
    _row("regnet_x_400mf", "widths by a rule", small=_blocks_of_widths),
    _row("efficientnet_b0", "squeeze and excitation, stochastic depth", small=_inverted),
    _row("efficientnet_v2_s", "fused inverted bottlenecks", 64, 384, small=_fused),
    _row("convnext_tiny", "layer norm over channels, stochastic depth", small=_scaled),
    _row("swin_t", "shifted windows, stochastic depth", 32, small=_of_class(
        "SwinTransformer", [4, 4], 8, [1, 1], [1, 2], [4, 4], stochastic_depth_prob=0.2)),
    _row("swin_v2_t", "cosine attention, positions by a network", 32, small=lambda m: m.SwinTransformer(
        [4, 4], 8, [1, 1], [1, 2], [4, 4], num_classes=CLASSES,
        block=m.swin_transformer.SwinTransformerBlockV2,
        downsample_layer=m.swin_transformer.PatchMergingV2)),
    _row("maxvit_t", "windows and grids", 64, small=_of_class(
        "MaxVit", (64, 64), 8, 4, [8, 16], [1, 1], 4, 0.2), rows=(4, 64)),
    _row("VisionTransformer", "nn.MultiheadAttention", 32, published=_VIT_B_16, **_TINY_VIT),
    _row("fcn_resnet50", "a class per pixel, dilation", 32, 224, "segmentation", rows=(5, 32)),
    _row("deeplabv3_mobilenet_v3_large", "pooling at several rates", 64, 224, "segmentation",
         rows=(5, 32)),
    _row("lraspp_mobilenet_v3_large", "a gate of the whole image", 64, 224, "segmentation",
         rows=(5, 32)),
    _row("r3d_18", "convolutions over time", 32, 112, "video", 16, (5, 32)),
    _row("mc3_18", "convolutions over time, then not", 32, 112, "video", 16, (5, 32)),
    _row("r2plus1d_18", "convolutions over space and time apart", 32, 112, "video", 16, (5, 32)),
    _row("mvit_v1_b", "pooling of queries, keys and values in videos", 32, 224, "video", 16, (5, 8),
         small=_pooled),
    _row("swin3d_t", "windows of space and time", 32, 224, "video", 16, (5, 8), small=_of_class(
        "video.swin_transformer.SwinTransformer3d", [2, 4, 4], 8, [1, 1], [1, 2], [2, 4, 4],
        stochastic_depth_prob=0.2)),
)  # fmt: skip
