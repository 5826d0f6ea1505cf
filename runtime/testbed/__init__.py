"""Unlike clusters emulated on one Linux machine; see docs/testbed.md."""

from hap.runtime.testbed.bed import Host, Testbed

__all__ = ["Host", "Testbed"]
