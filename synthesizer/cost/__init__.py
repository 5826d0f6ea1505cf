"""Prices of operators, collectives and serial programs. Imports ``rules``."""
