"""Lower bounds of the step, and branch and bound. Imports ``search``, ``cost``, ``rules``."""
