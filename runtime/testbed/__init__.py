"""Emulation of heterogeneous clusters on one Linux machine; see docs/testbed.md.

Names are imported on first use, since a helper process of the quotas needs no torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hap.runtime.testbed.hosts import Host, Testbed, clean

__all__ = ["Host", "Testbed", "clean"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.hosts"), name)
