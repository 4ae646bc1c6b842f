"""Figures of starting, of cells, and of idle sessions."""
