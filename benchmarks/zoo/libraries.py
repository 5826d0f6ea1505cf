"""Networks of other libraries: medical images, segmentation, contrastive pairs, graphs, speech."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.zoo.diffusion import Wrapped
from benchmarks.zoo.entry import Built, Entry, pretrained
from benchmarks.zoo.optional import package


def segmented(
    name: str, brings: str, library: str, make: Callable[[Any], nn.Module], loss: Callable[[Any], Any],
    shapes: tuple[tuple[int, ...], tuple[int, ...]], *, channel: bool, rows: int = 16,
    full: Callable[[Any], nn.Module] | None = None,
) -> Entry:  # fmt: skip
    """An entry for a network that labels pixels or voxels in two classes.

    Args:
        make: builds the network from the library; ``full``: in the published size.
        channel: have the labels a dim of size 1 for channels?
    """

    def build(make: Callable[[Any], nn.Module], shape: tuple[int, ...], rows: int) -> Built:
        module = package(library)
        difference = loss(module)
        labels = torch.randint(2, (rows, *((1,) if channel else ()), *shape[1:]))

        def step(net: nn.Module, x: Tensor, labels: Tensor) -> Any:
            return difference(net(x), labels)

        return Wrapped(make(module), step).train(), {
            "x": torch.randn(rows, *shape),
            "labels": labels,
        }

    return Entry(
        name=name, family="other libraries", brings=brings, tiny=partial(build, make, shapes[0], 6),
        full=partial(build, full or make, shapes[1], rows), requires=library,
    )  # fmt: skip


def _paired(sizes: Mapping[str, Any], rows: int) -> Built:
    """Images and texts that belong together."""
    library = package("open_clip")
    model = library.CLIP(**sizes)
    difference = library.ClipLoss()
    eye, ear = sizes["vision_cfg"], sizes["text_cfg"]
    batch = {
        "image": torch.randn(rows, 3, eye["image_size"], eye["image_size"]),
        "text": torch.randint(1, ear["vocab_size"], (rows, ear["context_length"])),
    }
    return Wrapped(model, lambda net, image, text: difference(*net(image, text))).train(), batch


class _Graph(nn.Module):
    """Two layers of attention over the edges of a graph."""

    def __init__(self, features: int, hidden: int, classes: int) -> None:
        super().__init__()
        layers = package("torch_geometric.nn")
        self.first = layers.GATConv(features, hidden, heads=4, add_self_loops=False)
        self.second = layers.GATConv(4 * hidden, classes, add_self_loops=False)

    def forward(self, x: Tensor, edges: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.second(self.first(x, edges).relu(), edges), labels)


def _graph(features: int, hidden: int, classes: int, nodes: int, edges: int) -> Built:
    batch = {
        "x": torch.randn(nodes, features), "edges": torch.randint(nodes, (2, edges)),
        "labels": torch.randint(classes, (nodes,)),
    }  # fmt: skip
    return _Graph(features, hidden, classes).train(), batch


def _text(sizes: Mapping[str, Any], words: int, length: int, rows: int) -> Built:
    library = package("x_transformers")
    layers = library.Decoder(rotary_pos_emb=True, ff_glu=True, use_rmsnorm=True, **sizes)
    net = library.TransformerWrapper(num_tokens=words, max_seq_len=length, attn_layers=layers)
    model = Wrapped(library.AutoregressiveWrapper(net), lambda net, text: net(text))
    return model.train(), {"text": torch.randint(words, (rows, length + 1))}


def _spoken(config: Any, rows: int) -> dict[str, Tensor]:
    length = 400 if rows < 32 else 16000
    labels = torch.randint(1, config.vocab_size, (rows, 5 if rows < 32 else 20))
    labels[1, 3:] = -100
    return {"input_values": torch.randn(rows, length), "labels": labels}


def _monai_unet(library: Any, channels: tuple[int, ...] = (4, 8, 16)) -> nn.Module:
    strides = (2,) * (len(channels) - 1)
    made: nn.Module = package("monai.networks.nets").UNet(
        spatial_dims=3,
        in_channels=1,
        out_channels=2,
        channels=channels,
        strides=strides,
        num_res_units=2,
    )
    return made


def _dice(library: Any) -> Any:
    return package("monai.losses").DiceCELoss(to_onehot_y=True, softmax=True)


LIBRARIES = (
    pretrained(
        "wav2vec2-ctc", "audio", "labels of any length (connectionist temporal classification)", "Wav2Vec2ForCTC",
        "Wav2Vec2Config", _spoken, both={"layerdrop": 0.0, "apply_spec_augment": False, "ctc_zero_infinity": True},
        tiny={"vocab_size": 20, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
              "intermediate_size": 40, "conv_dim": (16, 16), "conv_stride": (5, 2), "conv_kernel": (10, 3),
              "num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 4},
    ),
    segmented("monai/unet", "voxels, overlap of classes (Dice) and their entropy", "monai", _monai_unet, _dice,
              ((1, 8, 8, 8), (1, 96, 96, 96)), channel=True,
              full=partial(_monai_unet, channels=(32, 64, 128, 256, 512))),
    segmented("smp/unet", "a residual network that reads, overlap of classes over the whole batch",
              "segmentation_models_pytorch", lambda smp: smp.Unet("resnet18", encoder_weights=None, classes=2),
              lambda smp: smp.losses.DiceLoss("multiclass"), ((3, 32, 32), (3, 256, 256)), channel=False, rows=64,
              full=lambda smp: smp.Unet("resnet34", encoder_weights=None, classes=2)),
    Entry(name="open_clip", family="contrastive", brings="a mask with infinities as a buffer", requires="open_clip",
          tiny=partial(_paired, {"embed_dim": 16, "vision_cfg": {"image_size": 16, "layers": 1, "width": 32, "head_width": 16, "patch_size": 8},
                                 "text_cfg": {"context_length": 8, "vocab_size": 61, "width": 32, "heads": 2, "layers": 1}}, 6),
          full=partial(_paired, {"embed_dim": 512, "vision_cfg": {"image_size": 224, "layers": 12, "width": 768, "patch_size": 32},
                                 "text_cfg": {"context_length": 77, "vocab_size": 49408, "width": 512, "heads": 8, "layers": 12}}, 64)),
    Entry(name="pyg/gat", family="other libraries", brings="softmax over the edges of each node", requires="torch_geometric",
          tiny=partial(_graph, 8, 6, 4, 20, 60), full=partial(_graph, 602, 64, 41, 20000, 400000)),
    Entry(name="x-transformers", family="other libraries", brings="gated layers, rotary embeddings", requires="x_transformers",
          tiny=partial(_text, {"dim": 32, "depth": 2, "heads": 4, "attn_dim_head": 8}, 61, 8, 6),
          full=partial(_text, {"dim": 1024, "depth": 12, "heads": 16}, 32000, 256, 64)),
)  # fmt: skip
