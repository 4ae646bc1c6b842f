"""Figures of nbparallel beside those of its peers: ``make bench`` writes benchmarks/results/DATE.md.

Each module has ``run(*, quick: bool) -> Section`` (see `benchmarks.report`): it checks results first, takes
turns with its peers in one run, and reports medians.
"""

import os

# What is installed has its bytecode; where this is set every process would compile this checkout again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
