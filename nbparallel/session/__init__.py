"""The kernel's side: who owns the ranks, sends cells, collects what they print."""
