"""Worlds that processes form themselves: which have joined, and what a supervisor hosts for its guests."""
