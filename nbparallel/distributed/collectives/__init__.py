"""The algorithms with which a group of ranks moves and combines data."""
