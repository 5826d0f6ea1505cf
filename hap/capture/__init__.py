"""From ``nn.Module`` to a graph, and all that touches torch's tracing.

Imports ``hap.ir`` and ``hap.cluster``. The runtime, the profiler and the face may import it; the
synthesizer may not, because planning needs no torch.
"""
