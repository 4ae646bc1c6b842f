"""Messages from one rank to another: rings, matching, packing, streams."""
