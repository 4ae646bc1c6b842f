"""Data-parallel training: buckets of gradients and their average."""
