"""The architectures that :mod:`benchmarks.coverage` plans and verifies, each tiny and in full size.

Models of transformers, torchvision and timm are built from their configurations, with random
weights: nothing is downloaded, as are those of libraries that build on them. Nothing in them is changed for
``hap``; options that a configuration sets are those that make the forward one graph, and say so. The packages
are optional.
"""

from benchmarks.zoo.adapters import ADAPTERS
from benchmarks.zoo.diffusion import DIFFUSION
from benchmarks.zoo.entry import Entry
from benchmarks.zoo.image_text import IMAGE_TEXT
from benchmarks.zoo.libraries import LIBRARIES
from benchmarks.zoo.native import NATIVE
from benchmarks.zoo.other import OTHER
from benchmarks.zoo.sequences import SEQUENCES
from benchmarks.zoo.spectral import SPECTRAL
from benchmarks.zoo.text import TEXT
from benchmarks.zoo.timm_convolutional import CONVOLUTIONAL
from benchmarks.zoo.timm_models import ATTENTION
from benchmarks.zoo.torchvision_models import TORCHVISION
from benchmarks.zoo.vision import VISION

ZOO: tuple[Entry, ...] = (
    *TEXT, *VISION, *OTHER, *IMAGE_TEXT, *ADAPTERS, *DIFFUSION, *LIBRARIES, *NATIVE, *SEQUENCES, *SPECTRAL, *TORCHVISION,
    *ATTENTION, *CONVOLUTIONAL,
)  # fmt: skip

__all__ = ["ZOO", "Entry"]
