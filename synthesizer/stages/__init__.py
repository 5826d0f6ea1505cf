"""Pipeline stages: microbatches, cuts, groups of devices, and the search over them."""
