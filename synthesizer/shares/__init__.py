"""Integer shares for a program, and storage shards. Imports ``cost`` and ``rules``."""
