"""Mappings, pages, limits of memory, and the layout of arrays in it."""
