"""The interface of prices, for the searches, the simulators and the memory models.

:class:`hap.synthesizer.cost.cost_model.CostModel` has the prices of the cluster; lower bounds and
reproduced planners have prices of their own.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from hap.cluster.link import messages
from hap.ir.graph import Graph, Node, Tensor
from hap.ir.placement import Placement
from hap.ir.program import Convert
from hap.synthesizer.cost.collective_cost import Quote
from hap.synthesizer.cost.hardware_model import HardwareModel, PerRank
from hap.synthesizer.cost.parts import Parts
from hap.synthesizer.rules.rule_table import Row


class Prices(ABC):
    """Seconds and bytes on one graph, one cluster and given parts of tensors.

    Every price is a vector over ranks or a number of seconds for all of them.
    """

    def __init__(
        self, graph: Graph, hardware: HardwareModel, parts: Parts, optimizer_states: int
    ) -> None:
        self.graph, self.hardware, self.parts, self.axes = graph, hardware, parts, parts.axes
        self.optimizer_states = optimizer_states
        self._local_bytes: dict[tuple[str, Placement], PerRank] = {}

    def local_bytes(self, tensor: Tensor, placement: Placement) -> PerRank:
        """Return the bytes of each rank's part of a tensor."""
        key = (tensor.name, placement)
        if key not in self._local_bytes:
            self._local_bytes[key] = tensor.nbytes * self.parts.of(*key)
        return self._local_bytes[key]

    def stored_bytes(self, parameter: Tensor, stored: Placement, *, trained: bool) -> PerRank:
        """Return the bytes of parameter, gradient and optimizer states of a stored shard."""
        copies = 2 + self.optimizer_states if trained else 1
        return copies * self.local_bytes(parameter, stored)

    @abstractmethod
    def compute(self, node: Node, row: Row) -> PerRank:
        """Return the seconds per rank of a node run by one of its rows."""

    @abstractmethod
    def update(self, parameter: Tensor, stored: Placement) -> PerRank:
        """Return the seconds per rank of the optimizer's step on the stored shard."""

    @abstractmethod
    def convert(
        self, tensor: Tensor, src: Placement, dst: Placement, *, fused: bool = False
    ) -> list[Quote]:
        """Return implementations of a conversion, the fastest first.

        Args:
            fused: the conversion will run with its neighbours, which pay for the start.
        """

    @abstractmethod
    def convert_group(self, group: Sequence[Convert]) -> list[Quote]:
        """Return implementations of neighbouring collectives that run as one."""

    def cross(self, group: Sequence[tuple[Node, Row]]) -> tuple[float, int] | None:
        """Return (seconds, messages) of neighbouring collectives between machines, or ``None``."""
        return None

    def messages(self, kind: str) -> int:
        """Return the number of consecutive messages of a collective in a ring."""
        return messages(kind, self.parts.ring_size)
