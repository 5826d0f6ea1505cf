"""Mutated plan files: each is refused, fails verification, or computes the same."""
