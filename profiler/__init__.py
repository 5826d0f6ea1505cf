"""Measure devices and links, and fit a cluster's figures to the measurements.

Imports ``hap.ir``, ``hap.cluster`` and ``hap.capture``; neither the runtime nor the synthesizer.
"""
