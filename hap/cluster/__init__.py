"""The hardware: devices, links, and the files that describe them.

Imports only ``hap.errors`` and ``hap.units``. No torch. Everything above may import it.
"""
