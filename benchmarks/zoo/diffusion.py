"""Models of diffusers: they predict the noise of an image or a video, or compress one."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.zoo.entry import Built, Entry
from benchmarks.zoo.optional import package

Step = Callable[..., Tensor]


class Wrapped(nn.Module):
    """A network of a library, and the loss of one training step of it."""

    def __init__(self, net: nn.Module, step: Step) -> None:
        super().__init__()
        self.net, self.step = net, step

    def forward(self, **batch: Tensor) -> Tensor:
        return self.step(self.net, **batch)


def denoised(net: Any, x: Tensor, noise: Tensor, t: Tensor, **conditions: Tensor) -> Tensor:
    """The mean square error of the predicted noise."""
    return F.mse_loss(net(x + noise, timestep=t, **conditions).sample, noise)


def noised(net: Any, x: Tensor, encoder_hidden_states: Tensor) -> Tensor:
    """Noise and its level are drawn in the step, as training scripts do."""
    noise, t = torch.randn_like(x), torch.randint(1000, (len(x),), device=x.device)
    kept = torch.cos(t / 1000 * math.pi / 2).view(-1, 1, 1, 1)
    seen = net(kept * x + (1 - kept**2).sqrt() * noise, t, encoder_hidden_states).sample
    return F.mse_loss(seen, noise)


def compressed(net: Any, x: Tensor) -> Tensor:
    """The error of an image behind a bottleneck of random numbers, and their divergence."""
    posterior = net.encode(x).latent_dist
    return F.mse_loss(net.decode(posterior.sample()).sample, x) + 1e-3 * posterior.kl().mean()


def controlled(
    nets: Any, x: Tensor, noise: Tensor, t: Tensor, text: Tensor, image: Tensor
) -> Tensor:
    """A frozen network that another one steers."""
    net, control = nets
    down, middle = control(x + noise, t, text, image, return_dict=False)
    out = net(
        x + noise,
        t,
        text,
        down_block_additional_residuals=down,
        mid_block_additional_residual=middle,
    )
    return F.mse_loss(out.sample, noise)


Shapes = Mapping[str, tuple[int, ...]]


def diffused(
    name: str, brings: str, model: str, shapes: tuple[Shapes, Shapes], *, tiny: Mapping[str, Any],
    full: Mapping[str, Any] | None = None, step: Step = denoised, rows: int = 32,
) -> Entry:  # fmt: skip
    """An entry for the class ``model``.

    Args:
        shapes: of one row's tensors beside noise and timestep, tiny and full.
        rows: of the full batch.
    """

    def build(options: Mapping[str, Any], shapes: Shapes, rows: int) -> Built:
        net = getattr(package("diffusers"), model)(**options)
        batch = {key: torch.randn(rows, *shape) for key, shape in shapes.items()}
        if "class_labels" in batch:
            batch["class_labels"] = torch.randint(10, (rows,))
        if step is denoised:
            whole = torch.randint(1000, (rows,))
            batch |= {"noise": torch.randn_like(batch["x"]), "t": whole}
        return Wrapped(net, step).train(), batch

    return Entry(
        name=name, family="diffusion", brings=brings, tiny=partial(build, tiny, shapes[0], 6),
        full=partial(build, full or {}, shapes[1], rows), requires="diffusers",
    )  # fmt: skip


def _controlnet(
    options: Mapping[str, Any], up: Mapping[str, Any], eyes: Mapping[str, Any], size: int, image: int,
    rows: int,
) -> Built:  # fmt: skip
    diffusers = package("diffusers")
    frozen = diffusers.UNet2DConditionModel(**options, **up).requires_grad_(False)
    control = diffusers.ControlNetModel(**options, **eyes)
    batch = {
        "x": torch.randn(rows, 4, size, size), "noise": torch.randn(rows, 4, size, size),
        "t": torch.randint(1000, (rows,)), "image": torch.randn(rows, 3, image, image),
        "text": torch.randn(rows, 7, options["cross_attention_dim"]),
    }  # fmt: skip
    return Wrapped(nn.ModuleList([frozen, control]), controlled).train(), batch


UNET: dict[str, Any] = {
    "layers_per_block": 1, "block_out_channels": (8, 16), "norm_num_groups": 4, "cross_attention_dim": 12,
    "attention_head_dim": 4, "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
}  # fmt: skip
UP: dict[str, Any] = {"up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"), "sample_size": 8}
TEXT = {"encoder_hidden_states": (5, 12)}
PICTURE = {"x": (4, 8, 8)}

DIFFUSION = (
    diffused("stable diffusion", "noise drawn in the step, cross-attention at several resolutions",
             "UNet2DConditionModel", (PICTURE | TEXT, {"x": (4, 64, 64), "encoder_hidden_states": (77, 768)}),
             tiny=UNET | UP, full={"cross_attention_dim": 768, "sample_size": 64}, step=noised),
    diffused("autoencoder", "a random bottleneck and its divergence", "AutoencoderKL",
             ({"x": (3, 16, 16)}, {"x": (3, 256, 256)}), step=compressed, rows=16,
             tiny={"block_out_channels": (8, 16), "norm_num_groups": 4, "latent_channels": 4,
                   "down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2},
             full={"block_out_channels": (128, 256, 512, 512), "layers_per_block": 2, "latent_channels": 4,
                   "down_block_types": ("DownEncoderBlock2D",) * 4, "up_block_types": ("UpDecoderBlock2D",) * 4}),
    diffused("dit", "scales and shifts made from a timestep and a class", "DiTTransformer2DModel",
             (PICTURE | {"class_labels": ()}, {"x": (4, 32, 32), "class_labels": ()}),
             tiny={"num_attention_heads": 2, "attention_head_dim": 8, "in_channels": 4, "out_channels": 4, "num_layers": 2,
                   "sample_size": 8, "patch_size": 2, "num_embeds_ada_norm": 10, "norm_num_groups": 4}),
    diffused("stable diffusion 3", "text and image in one attention, two streams of weights", "SD3Transformer2DModel",
             (PICTURE | TEXT | {"pooled_projections": (10,)},
              {"x": (16, 64, 64), "encoder_hidden_states": (154, 4096), "pooled_projections": (2048,)}),
             tiny={"sample_size": 8, "patch_size": 2, "in_channels": 4, "num_layers": 2, "attention_head_dim": 8,
                   "num_attention_heads": 2, "joint_attention_dim": 12, "caption_projection_dim": 16,
                   "pooled_projection_dim": 10, "out_channels": 4},
             full={"sample_size": 128, "num_layers": 24, "num_attention_heads": 24, "caption_projection_dim": 1536}),
    diffused("wan", "videos, rotary embeddings of three axes", "WanTransformer3DModel",
             ({"x": (4, 2, 8, 8)} | TEXT, {"x": (16, 5, 32, 32), "encoder_hidden_states": (77, 4096)}),
             tiny={"num_attention_heads": 2, "attention_head_dim": 12, "in_channels": 4, "out_channels": 4,
                   "text_dim": 12, "freq_dim": 16, "ffn_dim": 32, "num_layers": 2, "rope_max_seq_len": 32},
             full={"num_attention_heads": 12, "ffn_dim": 8960, "num_layers": 30}, rows=16),
    Entry(name="controlnet", family="diffusion", brings="a frozen network that a trained one steers", requires="diffusers",
          tiny=partial(_controlnet, UNET, UP, {"conditioning_embedding_out_channels": (4, 8)}, 8, 16, 6),
          full=partial(_controlnet, {"cross_attention_dim": 768}, {"sample_size": 64}, {}, 64, 512, 16)),
)  # fmt: skip
