"""A pytest plugin that remembers which repetitions have run, so that the long runs can be cut in pieces.

``pytest -p tests.faults.sweep.sweep_record --repeat 50 …`` notes every result in ``build/sweep.log`` at
once, and leaves out what was noted before, there or in ``build/sweep-runs.csv``.  A test counts from its last
failure on: after a repair all its repetitions run again.

    python -m tests.faults.sweep.sweep_record 50 1

moves the log into ``build/sweep-runs.csv`` and renews the table of ``README.md`` beside this file:
which tests have passed 50 times, and once on the busy core (one number stands for both).
"""

from __future__ import annotations

import csv
import os
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent.parent
LOG = ROOT / "build" / "sweep.log"
COMMITTED = ROOT / "build" / "sweep-runs.csv"
PAGE = Path(__file__).with_name("README.md")
BEGIN, END = "<!-- table: tests.faults.sweep.sweep_record -->", "<!-- end of the table -->"
PLAIN, BUSY = "plain", "busy core"


@dataclass(frozen=True, slots=True)
class Runs:
    """What one test did on one commit."""

    test: str
    place: str
    commit: str
    passed: int
    failed: int


def base_name(nodeid: str, repetition: int | None) -> str:
    """Return a test's name without the number of the repetition, which stands first; None: it has none.

    >>> base_name("t.py::test_a[7-x]", 7), base_name("t.py::test_b[7]", 7), base_name("t.py::test_c[0]", None)
    ('t.py::test_a[x]', 't.py::test_b', 't.py::test_c[0]')
    """
    name, bracket, rest = nodeid.partition("[")
    if repetition is None:
        return nodeid
    if rest == f"{repetition}]":
        return name
    return name + bracket + rest.removeprefix(f"{repetition}-")


def read(committed: Path = COMMITTED, log: Path = LOG) -> list[Runs]:
    """Return all runs, older ones first."""
    runs = []
    if committed.exists():
        with committed.open(newline="") as file:
            runs = [
                Runs(row["test"], row["place"], row["commit"], int(row["passed"]), int(row["failed"]))
                for row in csv.DictReader(file)
            ]
    return runs + list(_fold(log.read_text().splitlines() if log.exists() else ()))


def _fold(lines: Iterable[str]) -> Iterator[Runs]:
    counts: dict[tuple[str, str, str], Counter[str]] = defaultdict(Counter)
    for line in lines:
        place, commit, outcome, test = line.split("\t")
        counts[test, place, commit][outcome] += 1
    for (test, place, commit), found in counts.items():
        yield Runs(test, place, commit, found["passed"], found["failed"])


def green(runs: Iterable[Runs]) -> dict[tuple[str, str], int]:
    """Return how often each test has passed in each place since it last failed there.

    What passed on the very commit on which it also failed does not count.
    """
    passed: dict[tuple[str, str], int] = {}
    broken: dict[tuple[str, str], str] = {}
    for run in runs:
        key = run.test, run.place
        if run.failed:
            passed[key], broken[key] = 0, run.commit
        elif broken.get(key) != run.commit:
            passed[key] = passed.get(key, 0) + run.passed
    return passed


def names_of_today() -> list[str]:
    """Return the tests that the long runs repeat."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-m", "fault or stress"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return [line for line in done.stdout.splitlines() if "::" in line]


def table(runs: list[Runs], tests: Sequence[str], wanted: int, wanted_busy: int) -> str:
    """Return the table of the long runs: for each file, how many of `tests` have passed often enough."""
    passed = green(runs)
    files: dict[str, list[str]] = defaultdict(list)
    for test in tests:
        files[test.partition("::")[0]].append(test)
    failures = Counter[str]()
    for run in runs:
        failures[run.test.partition("::")[0]] += run.failed
    rows = [
        f"| file | tests green ≥ {wanted} × | on a busy core ≥ {wanted_busy} × "
        "| runs, green | failed, repaired |",
        "|---|---|---|---|---|",
    ]
    for file in sorted(files):
        cells = [
            f"{sum(passed.get((test, place), 0) >= least for test in files[file])} of {len(files[file])}"
            for place, least in ((PLAIN, wanted), (BUSY, wanted_busy))
        ]
        total = sum(passed.get((test, place), 0) for test in files[file] for place in (PLAIN, BUSY))
        rows.append(f"| `{file}` | {cells[0]} | {cells[1]} | {total:,} | {failures[file]} |")
    return "\n".join(rows)


def renew(page: str, rows: str) -> str:
    """Return the page with these rows instead of those between its two comments."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not end:
        raise ValueError(f"the page lacks the lines {BEGIN!r} and {END!r}, between which the table stands")
    return f"{before}{begin}\n{rows}\n{end}{after}"


def merge(committed: Path = COMMITTED, log: Path = LOG) -> list[Runs]:
    """Move the log into the committed file; return all runs."""
    runs = read(committed, log)
    draft = committed.with_suffix(".tmp")
    with draft.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["test", "place", "commit", "passed", "failed"])
        writer.writerows([run.test, run.place, run.commit, run.passed, run.failed] for run in runs)
    draft.replace(committed)
    log.unlink(missing_ok=True)
    return runs


# -- the plugin ----------------------------------------------------------------------------------------------

_failed: set[str] = set()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Say where the record lies."""
    parser.addoption("--sweep-log", type=Path, default=LOG, help="where results are noted at once")
    parser.addoption("--sweep-runs", type=Path, default=COMMITTED, help="what was noted before")


def _place(config: pytest.Config) -> str:
    return BUSY if config.getoption("--busy-core") else PLAIN


def _commit() -> str:
    words = ["git", "describe", "--always", "--dirty=+", "--abbrev=9"]
    return subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


def pytest_configure(config: pytest.Config) -> None:
    """Note where this runs, and on what."""
    config.stash[_HEAD] = f"{_place(config)}\t{_commit()}"


_HEAD = pytest.StashKey[str]()


def _repetition(item: pytest.Item) -> int | None:
    call = getattr(item, "callspec", None)
    return call.params.get("repetition") if call is not None else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the first repetitions of a test, as many as have passed."""
    runs = read(config.getoption("--sweep-runs"), config.getoption("--sweep-log"))
    passed, place = green(runs), _place(config)
    keep, done = [], []
    for item in items:
        repetition = _repetition(item)
        name = base_name(item.nodeid, repetition)
        item.user_properties.append(("sweep", name))
        (done if (repetition or 0) < passed.get((name, place), 0) else keep).append(item)
    config.hook.pytest_deselected(items=done)
    items[:] = keep


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    """Write down how a repetition ended, once its teardown has."""
    report: pytest.TestReport = yield  # type: ignore[misc]
    if report.failed:
        _failed.add(item.nodeid)
    if report.when == "teardown":
        outcome = "failed" if item.nodeid in _failed else "passed"
        name = dict(item.user_properties)["sweep"]
        log: Path = item.config.getoption("--sweep-log")
        log.parent.mkdir(exist_ok=True)
        line = f"{item.config.stash[_HEAD]}\t{outcome}\t{name}\n".encode()
        fd = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            os.write(fd, line)  # in one piece: several runs may write
        finally:
            os.close(fd)
    return report


if __name__ == "__main__":
    least = [int(word) for word in sys.argv[1:]] or [50]
    runs, tests = merge(), names_of_today()
    if gone := sorted({run.test for run in runs} - set(tests)):
        print("not in the table, since no test of today has this name:", *gone, sep="\n")
    PAGE.write_text(renew(PAGE.read_text(), table(runs, tests, least[0], least[-1])))
