"""The life of a segment: which process uses it, from its allocation to its reuse."""
