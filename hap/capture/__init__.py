"""Capture an ``nn.Module`` as a graph; all code that touches torch's tracing.

Imports ``hap.ir`` and ``hap.cluster``. The runtime, the profiler and the public API may import it; the
synthesizer may not, because planning needs no torch.
"""
