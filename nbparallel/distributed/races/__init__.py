"""Data races between ranks on shared arrays: what a checked cell records, and what the kernel finds in it."""
