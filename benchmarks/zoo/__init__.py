"""The architectures that :mod:`benchmarks.coverage` plans and verifies, each tiny and in full size.

Models of transformers are built from their configurations, with random weights: nothing is
downloaded. Nothing in them is changed for ``hap``; options that a configuration sets are those
that make the forward one graph, and say so.
"""

from benchmarks.zoo.entry import Entry
from benchmarks.zoo.native import NATIVE
from benchmarks.zoo.other import OTHER
from benchmarks.zoo.text import TEXT
from benchmarks.zoo.timm_models import TIMM
from benchmarks.zoo.torchvision_models import TORCHVISION
from benchmarks.zoo.vision import VISION

ZOO: tuple[Entry, ...] = (*TEXT, *VISION, *OTHER, *NATIVE, *TORCHVISION, *TIMM)

__all__ = ["ZOO", "Entry"]
