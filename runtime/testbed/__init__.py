"""Unlike clusters emulated on one Linux machine; see docs/testbed.md.

The names are loaded on first use: a helper process of the quotas needs no torch.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hap.runtime.testbed.bed import Host, Testbed, clean

__all__ = ["Host", "Testbed", "clean"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from hap.runtime.testbed import bed

    return getattr(bed, name)
