"""Convolutional models of timm: a row each."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from torch import nn

from benchmarks.zoo.packages import CLASSES
from benchmarks.zoo.timm_models import Small, row

_DEPTHS: dict[str, Any] = {"depths": (1, 1, 1, 1)}
_SMALL: dict[str, Any] = {**_DEPTHS, "dims": (8, 16, 24, 32)}
_RESNET: dict[str, Any] = {"layers": (1, 1, 1, 1), "channels": (8, 16, 24, 32)}


def _searched(*stages: str, family: str = "EfficientNet") -> Small:
    """A network of EfficientNet's or MobileNetV3's class, with these blocks.

    Args:
        stages: in timm's own notation, which its published models are written in too.
    """

    def small(m: ModuleType) -> nn.Module:
        decode = m._efficientnet_builder.decode_arch_def
        classes = {"EfficientNet": m.efficientnet, "MobileNetV3": m.mobilenetv3}
        made: nn.Module = getattr(classes[family], family)(
            decode([[stage] for stage in stages]), num_classes=CLASSES, stem_size=8, num_features=24
        )
        return made

    return small


def _ghost(m: ModuleType) -> nn.Module:
    stages = [[[3, 16, 16, 0, 1]], [[3, 32, 24, 0.25, 2]], [[5, 48, 24, 0, 1]]]
    made: nn.Module = m.ghostnet.GhostNet(stages, num_classes=CLASSES)
    return made


def _resolutions(m: ModuleType) -> dict[str, Any]:
    def stage(block: str, *channels: int) -> dict[str, Any]:
        count = len(channels)
        return {
            "num_modules": 1, "num_branches": count, "block_type": block,
            "num_blocks": (1,) * count, "num_channels": channels, "fuse_method": "SUM",
        }  # fmt: skip

    return {
        "stem_width": 8, "stage1": stage("BOTTLENECK", 4), "stage2": stage("BASIC", 4, 8),
        "stage3": stage("BASIC", 4, 8, 12), "stage4": stage("BASIC", 4, 8, 12, 16),
    }  # fmt: skip


def _partial(m: ModuleType) -> dict[str, Any]:
    csp = m.cspnet
    return {
        "stem": csp.CspStemCfg(out_chs=8, kernel_size=7, stride=4, pool="max"),
        "stages": csp.CspStagesCfg(
            depth=(1, 1), out_chs=(16, 24), stride=(1, 2), expand_ratio=2.0, bottle_ratio=0.5,
            cross_linear=True,
        ),
    }  # fmt: skip


def _of_blocks(kind: str, **options: Any) -> Small:
    """Two stages of one block of a kind."""

    def small(m: ModuleType) -> dict[str, Any]:
        block = m.byobnet.ByoBlockCfg
        stages = tuple(block(type=kind, d=1, c=c, s=2, **options) for c in (8, 16))
        return {"blocks": stages, "stem_chs": 8}

    return small


def _vgg(m: ModuleType) -> nn.Module:
    stages = [8, "M", 8, "M", 16, "M", 16, "M", 16, "M"]
    made: nn.Module = m.vgg.VGG(stages, num_classes=CLASSES, mlp_ratio=0.01)
    return made


CONVOLUTIONAL = (
    row("vgg11", "plain convolutions, a large head", 224, rows=5, small=_vgg),
    row("resnet18", "batch norm, shortcuts", **_RESNET),
    row("seresnet50", "squeeze and excitation", **_RESNET),
    row("ecaresnet26t", "a convolution over channels as a gate", **_RESNET, stem_width=8),
    row("resnetv2_50", "norms before convolutions", layers=(1, 1, 1, 1), channels=(16, 16, 32, 32),
        stem_chs=8),
    row("resnest14d", "attention between splits", **_RESNET, stem_width=8),
    row("skresnet18", "selection of kernels", layers=(1, 1, 1, 1), channels=(32, 32, 32, 32)),
    row("res2net50_26w_4s", "a hierarchy inside a block", **_RESNET),
    row("hrnet_w18_small", "four resolutions side by side", small=_resolutions),
    row("dla46_c", "aggregation in trees", levels=(1, 1, 1, 1, 1, 1),
        channels=(8, 8, 16, 16, 16, 32)),
    row("dpn48b", "two paths: added and concatenated", k_sec=(1, 1, 1, 1), k_r=16, groups=4,
        inc_sec=(4, 4, 4, 4)),
    row("densenet121", "every layer reads all before it", growth_rate=4, block_config=(2, 2)),
    row("rdnet_tiny", "dense connections of wide blocks", num_init_features=8,
        growth_rates=(8, 8, 8), num_blocks_list=(1, 1, 1), is_downsample_block=(None, True, True),
        block_type=("Block", "Block", "BlockESE")),
    row("ese_vovnet19b_slim", "one aggregation per block", stem_chs=(8, 8, 8),
        stage_conv_chs=(8, 8, 8, 8), stage_out_chs=(8, 16, 16, 24), layer_per_block=2),
    row("cspresnet50", "half the channels pass by", small=_partial),
    row("selecsls42", "selective long and short shortcuts"),
    row("hgnet_tiny", "many small convolutions gathered"),
    row("regnetx_002", "widths by a rule, groups", depth=4, w0=8, wa=8.0, wm=1.72, group_size=8),
    row("regnety_002", "squeeze and excitation", depth=4, w0=8, wa=8.0, wm=1.72, group_size=8),
    row("nf_regnet_b0", "weights normed in the forward, no batch norm", depths=(1, 1, 1, 1),
        channels=(16, 16, 24, 32), stem_chs=8),
    row("repvgg_a0", "three branches added", small=_of_blocks("rep", gs=0, br=1.0)),
    row("mobileone_s0", "several branches of each convolution",
        small=_of_blocks("one", gs=1, br=1.0, block_kwargs={"num_conv_branches": 2})),
    row("gernet_s", "blocks chosen by a GPU's speed", small=_of_blocks("bottle", gs=0, br=0.25)),
    row("halonet26t", "attention in blocks with a halo", 64, 256,
        small=_of_blocks("self_attn", gs=0, br=0.5)),
    row("repvit_m0_9", "depthwise branches, two heads", depth=(1, 1, 1, 1), embed_dim=(8, 16, 24, 32)),
    row("shvit_s1", "one head for a part of the channels", 64, depth=(1, 1, 1),
        embed_dim=(16, 24, 32), partial_dim=(4, 8, 8)),
    row("fasternet_t0", "convolutions of a part of the channels", embed_dim=8, **_DEPTHS),
    row("efficientnet_b0", "inverted bottlenecks, SiLU", small=_searched(
        "ds_r1_k3_s1_e1_c8_se0.25", "ir_r1_k3_s2_e4_c16_se0.25", "ir_r1_k5_s2_e4_c16_se0.25")),
    row("mobilenetv3_small_050", "hard swish, narrow", small=_searched(
        "ds_r1_k3_s2_e1_c8_se0.25_nre", "ir_r1_k5_s2_e4_c16_se0.25", "cn_r1_k1_s1_c24",
        family="MobileNetV3")),
    row("mobilenetv4_conv_small", "universal bottlenecks", small=_searched(
        "cn_r1_k3_s2_e1_c8", "uir_r1_a5_k5_s2_e3_c16", "uir_r1_a3_k0_s1_e4_c16", "cn_r1_k1_s1_c24",
        family="MobileNetV3")),
    row("lcnet_050", "depthwise convolutions, few gates", small=_searched(
        "dsa_r1_k3_s1_c8", "dsa_r1_k5_s2_c16_se0.25", family="MobileNetV3")),
    row("mixnet_s", "kernels of several sizes side by side", small=_searched(
        "ds_r1_k3_s1_e1_c8", "ir_r1_k3.5_p1_s2_e4_c16_se0.25")),
    row("mnasnet_small", "a searched network", small=_searched(
        "ds_r1_k3_s1_c8", "ir_r1_k3_s2_e3_c16", "ir_r1_k5_s2_e4_c16_se0.25")),
    row("tinynet_e", "small width, depth and image", small=_searched(
        "ds_r1_k3_s1_e1_c8_se0.25", "ir_r1_k3_s2_e4_c16_se0.25")),
    row("ghostnet_050", "cheap channels from channels", small=_ghost),
    row("inception_v3", "branches concatenated", 96, 299),
    row("xception41", "separable convolutions", 64, 299, block_cfg=(
        {"in_chs": 64, "out_chs": 16, "stride": 2}, {"in_chs": 16, "out_chs": 24, "stride": 2})),
    row("convnext_atto", "depthwise convolutions, layer scale", **_SMALL),
    row("convnextv2_atto", "global response norm", **_SMALL),
    row("inception_next_atto", "strips of convolutions side by side", **_DEPTHS),
    row("convmixer_768_32", "depthwise convolutions of patches", small=lambda m: m.convmixer.ConvMixer(
        24, 2, kernel_size=3, patch_size=8, num_classes=CLASSES)),
    row("mambaout_femto", "gated convolutions", **_SMALL),
    row("starnet_s1", "products of two branches", base_dim=8, **_DEPTHS),
    row("test_efficientnet", "0.4 million parameters", 32, 160),
    row("test_resnet", "0.5 million parameters", 64, 160),
    row("test_convnext", "0.3 million parameters", 64, 160),
    row("test_nfnet", "0.4 million parameters, no norms", 64, 160),
    row("test_byobnet", "0.5 million parameters", 64, 160),
)  # fmt: skip
