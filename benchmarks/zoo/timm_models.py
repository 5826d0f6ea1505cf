"""Models of timm with attention, or with products over tokens or pooling in its place: a row each.

A tiny model has the options of its row; where a model's own function fixes its blocks, ``small``
makes them, or an instance of the same class.
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

Small = Callable[[ModuleType], Any]
"""``timm.models`` -> a tiny model, or further options of one."""


def _make(name: str, small: Small | None = None, **options: Any) -> nn.Module:
    timm = package("timm")
    made = small(timm.models) if small else {}
    if isinstance(made, nn.Module):
        return made
    model: nn.Module = timm.create_model(name, **made, **options)
    return model


def row(
    name: str, brings: str, tiny_size: int = 64, full_size: int = 224, rows: int = 6,
    small: Small | None = None, called: bool = False, **tiny: Any,
) -> Entry:  # fmt: skip
    shapes = (3, tiny_size, tiny_size), (3, full_size, full_size)
    tiny |= {"small": small} if small else {}
    return packaged(
        "timm", f"timm/{name}", brings, partial(_make, name), tiny, shapes, (rows, 64),
        called=called,
    )  # fmt: skip


_TOKENS: dict[str, Any] = {"img_size": 32, "patch_size": 8, "embed_dim": 24, "depth": 2}
_HEADS: dict[str, Any] = {**_TOKENS, "num_heads": 4}
_WINDOWS: dict[str, Any] = {
    "img_size": 32, "patch_size": 2, "window_size": 4, "embed_dim": 8, "depths": (2, 2),
    "num_heads": (2, 4),
}  # fmt: skip
_ONE_EACH: dict[str, Any] = {"depths": (1, 1, 1, 1)}
_WIDTHS = (8, 16, 24, 32)
_HEADED: dict[str, Any] = {**_ONE_EACH, "embed_dims": _WIDTHS, "num_heads": (1, 2, 3, 4)}


def of_class(path: str, **options: Any) -> Small:
    """A model of a class of ``timm.models``, where the function of a name takes no other sizes."""
    module, _, name = path.partition(".")

    def small(m: ModuleType) -> nn.Module:
        model: nn.Module = getattr(getattr(m, module), name)(num_classes=CLASSES, **options)
        return model

    return small


def _meta_former(first: str, then: str) -> Small:
    """Two stages with one mixer of tokens, two with another."""

    def small(m: ModuleType) -> nn.Module:
        f = m.metaformer
        norms = {"Attention": f.LayerNormNoBias, "SepConv": f.LayerNorm2dNoBias}
        names = (first, first, then, then)
        model: nn.Module = f.MetaFormer(
            num_classes=CLASSES, depths=(1, 1, 1, 1), dims=(8, 16, 32, 64),
            token_mixers=[getattr(f, name) for name in names],
            norm_layers=[norms.get(name, f.GroupNorm1) for name in names],
        )  # fmt: skip
        return model

    return small


def _mixer(block: str, inner: str = "Mlp") -> Small:
    def small(m: ModuleType) -> nn.Module:
        model: nn.Module = m.mlp_mixer.MlpMixer(
            CLASSES, img_size=64, patch_size=16, embed_dim=24, num_blocks=2, mlp_ratio=4,
            block_layer=getattr(m.mlp_mixer, block), mlp_layer=getattr(m.mlp_mixer, inner),
        )  # fmt: skip
        return model

    return small


def _mobile_vit(m: ModuleType) -> dict[str, Any]:
    """Return one block before the tokens, and one with them."""
    blocks = m.mobilevit
    return {
        "stem_chs": 8, "num_features": 16,
        "blocks": (
            blocks._inverted_residual_block(d=1, c=8, s=2, br=2.0),
            blocks._mobilevit_block(
                d=1, c=16, s=2, transformer_dim=24, transformer_depth=1, patch_size=2, br=2.0
            ),
        ),
    }  # fmt: skip


def _mobile_vit2(m: ModuleType) -> dict[str, Any]:
    blocks = m.mobilevit
    return {
        "stem_chs": 8,
        "blocks": (
            blocks._inverted_residual_block(d=1, c=8, s=2, br=2.0),
            blocks._mobilevitv2_block(d=1, c=16, s=2, transformer_depth=1),
        ),
    }


def _pooled(m: ModuleType) -> nn.Module:
    sizes = m.mvitv2.MultiScaleVitCfg(
        depths=(1, 1, 1, 1), embed_dim=(8, 16, 24, 32), num_heads=(1, 2, 3, 4)
    )
    model: nn.Module = m.mvitv2.MultiScaleVit(sizes, img_size=64, num_classes=CLASSES)
    return model


ATTENTION = (
    row("vit_tiny_patch16_224", "a class token, learned positions", 32, **_HEADS),
    row("deit_tiny_distilled_patch16_224", "two heads, averaged", 32, **_HEADS),
    row("beit_base_patch16_224", "relative position biases, no absolute ones", 32, **_HEADS),
    row("cait_xxs24_224", "talking heads, a class token in the last layers", 32, **_HEADS),
    row("xcit_nano_12_p16_224", "attention between channels", 32, **_HEADS),
    row("convit_tiny", "gated attention by position", 32, called=True, **_HEADS),
    row("vit_relpos_small_patch16_224", "relative positions by a small network", 32, **_HEADS),
    row("eva02_tiny_patch14_224", "rotary positions in two dims, SwiGLU", 56, img_size=56, depth=2,
        embed_dim=24),
    row("tnt_s_patch16_224", "tokens in tokens", 32, img_size=32, patch_size=16, embed_dim=24,
        inner_dim=8, depth=2),
    row("pit_ti_224", "pooling of tokens between stages", 32, img_size=32, patch_size=8, stride=4,
        base_dims=(8, 8, 8), depth=(1, 1, 1), heads=(1, 2, 4)),
    row("crossvit_tiny_240", "two patch sizes, crossed", 240, 240, depth=((1, 1, 0),),
        embed_dim=(12, 24)),
    row("levit_128s", "attention in a pyramid, batch norm everywhere", img_size=64,
        embed_dim=(16, 24, 32), key_dim=4, depth=(1, 1, 1), num_heads=(2, 3, 4)),
    row("swin_tiny_patch4_window7_224", "shifted windows", 32, **_WINDOWS),
    row("swinv2_tiny_window8_256", "cosine attention, positions from logarithms", 32, 256,
        **_WINDOWS),
    row("pvt_v2_b0", "keys of reduced images", depths=(1, 1, 1, 1)),
    row("twins_pcpvt_small", "positions by convolution", **_HEADED),
    row("twins_svt_small", "local and global attention in turn", 224, depths=(1, 1, 2, 1),
        embed_dims=(8, 16, 24, 32)),
    row("coat_lite_tiny", "factorized attention, convolutions for positions", img_size=64,
        serial_depths=(1, 1, 1, 1), embed_dims=(8, 16, 24, 32)),
    row("mvitv2_tiny", "pooling of queries, keys and values", small=_pooled),
    row("davit_tiny", "attention in windows and between channels", **_HEADED),
    row("maxvit_pico_rw_256", "windows and grids", 64, 256, img_size=64, stem_width=8,
        depths=(1, 1), embed_dim=(8, 16), transformer_dim_head=8),
    row("coatnet_nano_rw_224", "relative position biases of a whole image", img_size=64,
        stem_width=(8, 8), depths=(1, 1, 1, 1), embed_dim=_WIDTHS, transformer_dim_head=8),
    row("gcvit_xxtiny", "queries from the whole image", small=of_class(
        "gcvit.GlobalContextVit", img_size=64, window_ratio=(32, 32, 16, 32), depths=(1, 1, 1, 1),
        embed_dim=8, num_heads=(1, 1, 2, 2))),
    row("tiny_vit_5m_224", "attention with biases in windows", window_sizes=(4, 4, 4, 2), **_HEADED),
    row("hiera_tiny_224", "pooling of queries in units", img_size=(64, 64), stages=(1, 1, 1, 1),
        embed_dim=8),
    row("volo_d1_224", "attention made from one place", small=of_class(
        "volo.VOLO", layers=(1, 1, 1, 1), img_size=64, embed_dims=(16, 24, 24, 24),
        num_heads=(2, 4, 4, 4))),
    row("visformer_tiny", "attention by 1x1 convolutions", img_size=64, depth=(1, 1, 1),
        embed_dim=48, init_channels=8),
    row("nest_tiny", "attention in blocks of an image", small=of_class(
        "nest.Nest", img_size=64, depths=(1, 1, 1), embed_dims=(8, 16, 24), num_heads=(1, 2, 3))),
    row("mobilevit_xxs", "tokens unfolded from an image", small=_mobile_vit),
    row("mobilevitv2_050", "linear attention", small=_mobile_vit2),
    row("edgenext_xx_small", "attention between channels after convolutions", depths=(1, 1, 1, 1),
        dims=(8, 16, 24, 32)),
    row("efficientformer_l1", "pooling, then attention with biases", 224, depths=(1, 1, 1, 1),
        embed_dims=_WIDTHS),
    row("efficientformerv2_s0", "attention at a lower resolution, talking heads", img_size=64,
        depths=(1, 1, 1, 1), embed_dims=_WIDTHS, num_vit=1, mlp_ratios=((4,), (4,), (4,), (4,))),
    row("efficientvit_b0", "linear attention by ReLU", widths=(8, 8, 16, 16, 32),
        depths=(1, 1, 1, 1, 1), head_dim=8, head_widths=(32, 32)),
    row("efficientvit_m0", "groups of heads in a cascade", 224, depth=(1, 1, 1),
        embed_dim=(16, 32, 48), num_heads=(2, 2, 2)),
    row("fastvit_t8", "branches that may be merged after training", layers=(1, 1, 1, 1),
        embed_dims=(8, 16, 32, 64)),
    row("swiftformer_xs", "additive attention", layers=(1, 1, 1, 1), embed_dims=_WIDTHS),
    row("caformer_s18", "convolutions, then attention, squared ReLU",
        small=_meta_former("SepConv", "Attention")),
    row("poolformer_s12", "pooling in place of attention",
        small=_meta_former("Pooling", "Pooling")),
    row("mixer_s32_224", "products over tokens in place of attention", small=_mixer("MixerBlock")),
    row("resmlp_12_224", "affine maps in place of norms", small=_mixer("ResBlock")),
    row("gmlp_ti16_224", "gates over tokens", small=_mixer("SpatialGatingBlock", "GatedMlp")),
    row("sequencer2d_s", "LSTMs along rows and columns", 56, img_size=56, layers=(1, 1, 1, 1),
        embed_dims=(12, 16, 16, 16), hidden_sizes=(3, 4, 4, 4)),
    row("focalnet_tiny_srf", "gates from a focus of several widths", small=of_class(
        "focalnet.FocalNet", depths=(1, 1, 1, 1), embed_dim=8)),
    row("test_vit", "0.4 million parameters", 160, 160),
)  # fmt: skip
