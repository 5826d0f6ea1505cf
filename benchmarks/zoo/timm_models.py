"""Models of timm: one row each."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import nn

from benchmarks.zoo.entry import Entry
from benchmarks.zoo.packages import package, packaged


def _make(name: str, **options: Any) -> nn.Module:
    model: nn.Module = package("timm").create_model(name, **options)
    return model


def _row(
    name: str, brings: str, tiny_size: int = 64, full_size: int = 224, rows: int = 6, **tiny: Any
) -> Entry:
    shapes = (3, tiny_size, tiny_size), (3, full_size, full_size)
    make = partial(_make, name)
    return packaged("timm", f"timm/{name}", brings, make, tiny, shapes, (rows, 64))


_TOKENS: dict[str, Any] = {"img_size": 32, "patch_size": 8, "embed_dim": 24, "depth": 2}
_HEADS: dict[str, Any] = {**_TOKENS, "num_heads": 4}

TIMM = (
    _row("vit_tiny_patch16_224", "a class token, learned positions", 32, **_HEADS),
    _row("deit_tiny_distilled_patch16_224", "two heads, averaged", 32, **_HEADS),
    _row("cait_xxs24_224", "talking heads, a class token in the last layers", 32, **_HEADS),
    _row("xcit_nano_12_p16_224", "attention between channels", 32, **_HEADS),
    _row("mixer_s32_224", "products over tokens in place of attention", img_size=64),
    _row("resmlp_12_224", "affine maps in place of norms", img_size=64),
    _row("gmlp_ti16_224", "gates over tokens", img_size=64),
    _row("convit_tiny", "gated attention by position", 32, **_HEADS),
    _row("eva02_tiny_patch14_224", "rotary positions in two dims, SwiGLU", 56, img_size=56, depth=2),
    _row("levit_128s", "attention in a pyramid, batch norm everywhere", 224),
    _row("swin_tiny_patch4_window7_224", "shifted windows", 32, img_size=32, patch_size=2,
         window_size=4, embed_dim=8, depths=(2, 2), num_heads=(2, 4)),
    _row("swinv2_tiny_window8_256", "cosine attention, positions from logarithms", 32, 256,
         img_size=32, patch_size=2, window_size=4, embed_dim=8, depths=(2, 2), num_heads=(2, 4)),
    _row("pvt_v2_b0", "keys of reduced images", depths=(1, 1, 1, 1)),
    _row("twins_pcpvt_small", "positions by convolution", depths=(1, 1, 1, 1),
         embed_dims=(8, 16, 24, 32), num_heads=(1, 2, 3, 4)),
    _row("twins_svt_small", "local and global attention in turn", 224, depths=(1, 1, 2, 1),
         embed_dims=(8, 16, 24, 32)),
    _row("coat_lite_tiny", "factorized attention, convolutions for positions", img_size=64),
    _row("crossvit_tiny_240", "two patch sizes, crossed", 240, 240),
    _row("poolformer_s12", "pooling in place of attention"),
    _row("caformer_s18", "convolutions, then attention, squared ReLU"),
    _row("edgenext_xx_small", "attention between channels after convolutions"),
    _row("mobilevit_xxs", "tokens unfolded from an image"),
    _row("mobilevitv2_050", "linear attention"),
    _row("efficientformer_l1", "pooling, then attention with biases", 224),
    _row("efficientvit_b0", "linear attention by ReLU"),
    _row("efficientvit_m0", "groups of heads in a cascade", 224),
    _row("fastvit_t8", "branches that may be merged after training"),
    _row("davit_tiny", "attention in windows and between channels", depths=(1, 1, 1, 1),
         embed_dims=(8, 16, 24, 32), num_heads=(1, 2, 3, 4)),
    _row("maxvit_pico_rw_256", "windows and grids", 256, 256),
    _row("coatnet_nano_rw_224", "relative position biases of a whole image", 224),
    _row("gcvit_xxtiny", "queries from the whole image", 224),
    _row("tiny_vit_5m_224", "attention with biases in windows", 224),
    _row("tnt_s_patch16_224", "tokens in tokens", 32, img_size=32, patch_size=16, embed_dim=24,
         inner_dim=8, depth=2),
    _row("hiera_tiny_224", "pooling of queries in units", 224),
    _row("volo_d1_224", "attention made from one place", 224),
    _row("visformer_tiny", "attention by 1x1 convolutions", 224),
    _row("nest_tiny", "attention in blocks of an image", 224),
    _row("sequencer2d_s", "LSTMs along rows and columns", 224),
    _row("focalnet_tiny_srf", "gates from a focus of several widths"),
    _row("convnext_atto", "depthwise convolutions, layer scale", depths=(1, 1, 1, 1),
         dims=(8, 16, 24, 32)),
    _row("convnextv2_atto", "global response norm", depths=(1, 1, 1, 1), dims=(8, 16, 24, 32)),
    _row("inception_next_atto", "strips of convolutions side by side"),
    _row("mambaout_femto", "gated convolutions", depths=(1, 1, 1, 1), dims=(8, 16, 24, 32)),
    _row("starnet_s1", "products of two branches"),
    _row("resnet18", "batch norm, shortcuts"),
    _row("resnest14d", "attention between splits"),
    _row("skresnet18", "selection of kernels"),
    _row("res2net50_26w_4s", "a hierarchy inside a block"),
    _row("hrnet_w18_small", "four resolutions side by side"),
    _row("dla46_c", "aggregation in trees"),
    _row("dpn48b", "two paths: added and concatenated"),
    _row("densenet121", "every layer reads all before it"),
    _row("ese_vovnet19b_slim", "one aggregation per block"),
    _row("cspresnet50", "half the channels pass by"),
    _row("selecsls42", "selective long and short shortcuts"),
    _row("regnetx_002", "widths by a rule, groups"),
    _row("regnety_002", "squeeze and excitation"),
    _row("nf_regnet_b0", "weights normed in the forward, no batch norm"),
    _row("repvgg_a0", "three branches added"),
    _row("mobileone_s0", "several branches of each convolution"),
    _row("repvit_m0_9", "depthwise branches, two heads"),
    _row("efficientnet_b0", "inverted bottlenecks, SiLU"),
    _row("mobilenetv3_small_050", "hard swish, narrow"),
    _row("mobilenetv4_conv_small", "universal bottlenecks"),
    _row("mnasnet_small", "a searched network"),
    _row("tinynet_e", "small width, depth and image"),
    _row("ghostnet_050", "cheap channels from channels"),
    _row("inception_v3", "branches concatenated", 96, 299),
    _row("xception41", "separable convolutions", 64, 299),
    _row("test_efficientnet", "0.4 million parameters", 32, 160),
    _row("test_vit", "0.4 million parameters", 160, 160),
)  # fmt: skip
