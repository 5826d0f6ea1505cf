"""List scheduler, event simulator, memory over time. Imports ``cost`` and ``rules``."""
