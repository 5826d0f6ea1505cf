"""Run a plan on torch.distributed: emission, collectives, verification, launch.

Imports ``hap.ir``, ``hap.cluster`` and ``hap.capture``; neither the profiler nor the synthesizer.
"""
