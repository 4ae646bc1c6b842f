"""Where a segment's bytes are: one strategy a file."""
