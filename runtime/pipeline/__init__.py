"""Pipelines: run a plan's stages, each on its group of ranks, microbatch by microbatch."""
