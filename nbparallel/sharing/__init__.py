"""How an array's bytes become visible to another process."""
