"""A device of known figures, for tests that fit them to measurements."""

from __future__ import annotations

from hap.cluster.device import Device

TRUTH = Device(
    name="x:0", kind="x", node="x", memory_bytes=2**33,
    flops_per_s={"float32": 80e9, "float64": 35e9}, memory_bytes_per_s=20e9, launch_s=2e-6,
    operand_bytes_per_s=15e9, relaunch=0.5,
    efficiency={
        "conv": 1.05, "conv_backward": 0.9, "attention": 0.5, "attention_backward": 0.65,
        "math": 0.015, "tanh": 0.0045, "loss": 0.006, "reduce": 0.028, "norm": 0.02, "norm_backward": 0.01,
        "pool": 0.0057, "pool_backward": 0.004, "random": 0.0015,
        "update": 0.038,
    },
)  # fmt: skip
