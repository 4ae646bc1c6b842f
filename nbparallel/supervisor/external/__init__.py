"""Ranks that another program started: the socket that they connect to, their membership, their supervisor."""
