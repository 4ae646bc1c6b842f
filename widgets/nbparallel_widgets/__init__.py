"""Panels that render `statistics()`; no logic, no private attribute of the core."""
