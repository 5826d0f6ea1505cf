"""The space of programs, its cost tables, three engines, lowering. Imports ``cost``, ``rules``."""
