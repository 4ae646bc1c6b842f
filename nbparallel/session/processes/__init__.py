"""Ranks, template and supervisor as operating-system processes."""
