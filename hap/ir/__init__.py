"""Data structures of planning: graph, placements, program, plan.

Imports ``hap.cluster`` and the modules of ``hap`` that import nothing (errors, files, units). No
torch. Everything above may import it.
"""
