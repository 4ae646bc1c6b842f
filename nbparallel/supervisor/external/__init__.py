"""Ranks that another program started: their listener, their membership, their world."""
