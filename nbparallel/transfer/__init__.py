"""Serialisation of objects and arrays."""
