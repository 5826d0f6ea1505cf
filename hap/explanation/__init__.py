"""Alternatives to the choices of a plan: of one program, over two mesh axes, in stages.

Imports all but ``hap.cli``.
"""
