"""Run all benchmarks: ``python -m benchmarks [--quick] [--only NAME … [--replace]] [--output FILE]``."""

from __future__ import annotations

import argparse
import functools
import importlib.util
import sys
import time
from pathlib import Path

from benchmarks import plots, published
from benchmarks.report import PEERS, RESULTS, Section, installed, markdown, newest_results, replaced

MODULES = (
    "startup.first_cell",
    "startup.empty_cell",
    "startup.twelve_cells",
    "sharing.notebook_array",
    "sharing.sharing_pool",
    "sharing.small_arrays",
    "sharing.hand_over",
    "sharing.share_and_read",
    "sharing.many_small",
    "sharing.reclaim",
    "sharing.tensors",
    "operations.collectives",
    "operations.profile_operations",
    "operations.average_gradients",
    "operations.torch_training",
    "multiprocessing.messages",
    "multiprocessing.process_start",
    "multiprocessing.kept_messages",
    "multiprocessing.joblib_tasks",
    "multiprocessing.deaths",
    "multiprocessing.loader",
    "races.comparing",
    "races.recording",
    "startup.live_panel",
    "startup.idle",
)
"""Each has ``run(*, quick: bool) -> Section``, or a list of them."""
OPTIONAL = ("operations.tuning",)
"""Likewise, but only where it is asked for: it takes minutes, and says which constants to choose."""


def main() -> int:
    """Run the modules one after the other; print and write the results."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer rounds; figures are rough")
    parser.add_argument(
        "--only", nargs="+", choices=(*MODULES, *OPTIONAL), default=MODULES, help="some of the modules"
    )
    parser.add_argument("--output", type=Path, help="by default results/DATE.md when all modules ran")
    parser.add_argument(
        "--replace", action="store_true", help="write the sections of --only into the newest results"
    )
    options = parser.parse_args()
    for peer in PEERS:
        if not installed(peer):
            print(f"{peer} is not installed: its figures are missing", file=sys.stderr)
    sections: list[Section] = []
    for name in options.only:
        print(f"{name} …", file=sys.stderr, flush=True)
        if importlib.util.find_spec(f"benchmarks.{name}") is None:
            print(f"benchmarks/{name}.py is not there: its figures are missing", file=sys.stderr)
            continue
        found = importlib.import_module(f"benchmarks.{name}").run(quick=options.quick)
        sections += found if isinstance(found, list) else [found]
    page = markdown(sections, "make bench" + (" ARGS=--quick" if options.quick else ""))
    print(page)
    if options.replace:
        newest = newest_results()
        newest.write_text(functools.reduce(replaced, sections, newest.read_text()))
    complete = tuple(options.only) == MODULES and not options.quick
    if options.output or complete:
        (options.output or RESULTS / f"{time.strftime('%Y-%m-%d')}.md").write_text(page)
    if options.replace or (complete and not options.output):
        plots.main()
        published.main()
    return 0


if __name__ == "__main__":
    sys.exit(main())
