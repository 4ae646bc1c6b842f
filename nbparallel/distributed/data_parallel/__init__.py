"""Data-parallel training: batches for each rank, buckets of gradients and their average."""
