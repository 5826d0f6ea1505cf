"""The data that planning works on and a plan is made of: graph, placements, program, plan.

Imports ``hap.cluster`` and the modules of ``hap`` that import nothing (errors, files, units). No
torch. Everything above may import it.
"""
