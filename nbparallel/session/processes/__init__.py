"""Ranks, template and supervisor as operating-system processes.

What is said of a dead rank: `rank_handle` (exit code, signal), `supervisor_client` (memory ran out),
`session.tasks.outcomes` makes the error of them.
"""
