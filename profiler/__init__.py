"""Measuring devices and links, and fitting a cluster's figures to what was measured.

Imports ``hap.ir``, ``hap.cluster`` and ``hap.capture``; neither the runtime nor the synthesizer.
"""
