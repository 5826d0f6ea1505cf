"""A case as data: the lines of a forward, the shapes of its tensors, the devices, a seed."""

from __future__ import annotations

import json
import linecache
import pprint
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hap.cluster.device import Device
from hap.cluster.link import Link
from hap.cluster.topology import Cluster

Shape = tuple[int, ...]
Kind = str | int
"""Kind of an input: ``float``, ``bool``, or the upper bound of its random integers."""


class Machine(NamedTuple):
    """A device: its machine, its speed and its memory."""

    node: str
    flops_per_s: float
    memory_bytes: int = 2**40


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A module as straight-line Python, and the cluster to plan it for.

    ``params``: name -> shape; the lines read a parameter as ``self.NAME``. ``inputs``: name ->
    (shape, kind). ``lines`` define names; the last one returns the scalar loss. ``links``:
    bandwidth inside machines and between them, in bytes/s. ``seed``: of values and random programs.
    """

    params: Mapping[str, Shape]
    inputs: Mapping[str, tuple[Shape, Kind]]
    lines: tuple[str, ...]
    devices: tuple[Machine, ...]
    links: tuple[float, float] = (1e10, 1e9)
    launch_s: float = 1e-6
    latency_s: float = 1e-6
    seed: int = 0

    @property
    def source(self) -> str:
        """Python source of the forward."""
        body = "".join(f"    {line}\n" for line in self.lines)
        return f"def forward({', '.join(['self', *self.inputs])}):\n{body}"

    def model(self) -> nn.Module:
        """Return the module with random parameters."""
        file = f"<recipe {hash(self.source) & 0xFFFFFFFF:08x}>"
        linecache.cache[file] = (len(self.source), None, self.source.splitlines(True), file)
        scope: dict[str, Any] = {"torch": torch, "F": F}
        exec(compile(self.source, file, "exec"), scope)
        module = type("Net", (nn.Module,), {"forward": scope["forward"]})()
        random = torch.Generator().manual_seed(self.seed)
        for name, shape in self.params.items():
            value = torch.randn(shape, generator=random) * 0.5
            module.register_parameter(name, nn.Parameter(value))
        return module  # type: ignore[no-any-return]

    def batch(self) -> tuple[Tensor, ...]:
        """Return random inputs."""
        random = torch.Generator().manual_seed(self.seed + 1)
        return tuple(values(shape, kind, random) for shape, kind in self.inputs.values())

    def cluster(self) -> Cluster:
        """Return the cluster of the devices and their links."""
        nodes = dict.fromkeys(m.node for m in self.devices)
        devices = tuple(
            Device(
                name=f"{m.node}:{k}", kind=f"cpu {m.flops_per_s:g}", node=m.node,
                memory_bytes=m.memory_bytes, launch_s=self.launch_s,
                flops_per_s={"float32": m.flops_per_s}, memory_bytes_per_s=m.flops_per_s / 10,
            )
            for k, m in enumerate(self.devices)
        )  # fmt: skip
        inner, outer = (Link(w, self.latency_s) for w in self.links)
        return Cluster("fuzzed", devices, dict.fromkeys(nodes, inner), outer)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Recipe:
        return Recipe(
            params={name: tuple(shape) for name, shape in data["params"].items()},
            inputs={name: (tuple(shape), kind) for name, (shape, kind) in data["inputs"].items()},
            lines=tuple(data["lines"]),
            devices=tuple(Machine(*m) for m in data["devices"]),
            links=tuple(data["links"]),  # type: ignore[arg-type]
            launch_s=data["launch_s"], latency_s=data["latency_s"], seed=data["seed"],
        )  # fmt: skip

    def script(self) -> str:
        """Return a Python file that checks this case alone, run in the repository's root."""
        default = {f.name: f.default for f in fields(self)}
        said = {k: v for k, v in vars(self).items() if v != default[k]}
        given = "".join(
            f"    {name}={_indented(pprint.pformat(value, width=90, sort_dicts=False))},\n"
            for name, value in said.items()
        )
        return (
            "from tests.fuzz.check import check\n"
            "from tests.fuzz.recipe import Machine, Recipe\n\n"
            f"recipe = Recipe(\n{given})\n"
            'if __name__ == "__main__":\n    print(check(recipe))\n'
        )


def values(shape: Shape, kind: Kind, random: torch.Generator) -> Tensor:
    if kind == "float":
        return torch.randn(shape, generator=random)
    if kind == "bool":
        return torch.rand(shape, generator=random) < 0.6
    return torch.randint(int(kind), shape, generator=random)


def _indented(text: str) -> str:
    return text.replace("\n", "\n    ")


def load(path: str) -> Recipe:
    with open(path) as file:
        return Recipe.from_json(json.load(file))
