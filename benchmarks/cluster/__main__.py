"""Run the figures of sessions on hosts: ``python -m benchmarks.cluster [--quick] [--only NAME …]``."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from benchmarks.cluster import arrays, cells, losses, operations
from benchmarks.report import RESULTS, installed, markdown, not_installed

PAGE = RESULTS / f"hosts-{os.cpu_count()}-cores.md"
MODULES = {"cells": cells, "arrays": arrays, "operations": operations, "losses": losses}
TITLE = "Measured figures of several hosts"
ABOUT = (
    "Two hosts with two ranks each, which are workers on addresses of one machine: they share its cores and "
    "its memory, and no figure has a network's time in it."
)


def main() -> int:
    """Run the modules one after the other; print and write the page."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cluster", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer rounds; figures are rough")
    parser.add_argument("--only", nargs="+", choices=MODULES, default=list(MODULES), help="some of them")
    parser.add_argument("--output", type=Path, help=f"by default {PAGE.name} when all ran at full length")
    options = parser.parse_args()
    if not installed("distributed"):
        print(f"{not_installed('distributed')}: `make dask` puts it there", file=sys.stderr)
        return 1
    sections, load = [], [os.getloadavg()[0]]
    for name in options.only:
        print(f"{name} …", file=sys.stderr, flush=True)
        sections.append(MODULES[name].run(quick=options.quick))
        load.append(os.getloadavg()[0])
    busy = (
        f" Load of the machine before, and after each of these: {', '.join(f'{each:.1f}' for each in load)}."
    )
    command = "python -m benchmarks.cluster" + (" --quick" if options.quick else "")
    page = markdown(sections, command, title=TITLE, about=ABOUT + busy)
    print(page)
    complete = options.only == list(MODULES) and not options.quick
    if options.output or complete:
        (options.output or PAGE).write_text(page)
    return 0


if __name__ == "__main__":
    sys.exit(main())
