"""Three tiers of tests: a quick one before each commit, what it left out, and all tests.

``--tier quick`` leaves out tests marked ``slow`` and thins matrices; ``--tier rest`` runs a sixteenth of the
slow ones and of the cases that were left out of matrices; ``--tier all``, the default, runs every test.
Which ones a tier takes depends on a seed that changes from day to day, so that sixteen days of runs see most
of them; the header prints it and ``--matrix-seed`` sets it.

Markers
-------
``slow``
    Not in the quick tier; in the rest every sixteenth day.
``by_turns``
    In the quick tier every eighth day, on the others only in the whole: of more than half a second.
``matrix(cover=None, size=1, across_classes=False)``
    The quick tier runs a sample of this test's parametrised cases: at least `size`, and each value of each
    parameter that `cover` names at least once (None: of every parameter).  With `across_classes` the cases
    are those of all classes that inherit the test.  Of a test that is ``slow`` as well, the rest runs at
    most this sample.
``every_kernel``
    The quick tier runs this test on the older ipykernel as well (fixtures ``any_kernel``, ``shared_kernel``);
    of other tests with these fixtures, the rest runs a third on it.

Tests that loop over their cases take them from the fixture `sampled`, examples of hypothesis are counted by
`examples`.
"""

from __future__ import annotations

import datetime
import itertools
import random
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import pytest

from nbparallel.testing import processes

QUICK, REST, ALL = "quick", "rest", "all"
REST_SHARE = 16
"""Of slow tests, and of the cases that the quick tier leaves out of a matrix, the rest is one in so many: on
two slow cores that is what `.ci/run` has time for."""
TURNS = 8
"""Of tests that run by turns the quick tier takes one in so many."""
QUICK_EXAMPLES = 20
"""Examples of hypothesis for one test of the quick tier."""
WARN_SECONDS = 3.0
"""A test of the quick tier that takes longer is named at the end of the run."""
FAIL_SECONDS = 30.0
"""A test of the quick tier that takes longer fails, unless the machine is busy: mark it ``slow``.

Generous: a slow machine took 12 s for what takes 5 s on another, without a word in /proc/loadavg."""
_T = TypeVar("_T")
_tier = ALL
_durations = pytest.StashKey[dict[str, float]]()
_counts = pytest.StashKey[tuple[int, int]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--tier`` and ``--matrix-seed``."""
    group = parser.getgroup("nbparallel")
    group.addoption(
        "--tier", choices=(QUICK, REST, ALL), default=ALL, help="quick tests, what they left out, or all"
    )
    group.addoption(
        "--matrix-seed",
        type=int,
        metavar="N",
        help="what the quick tier takes of a matrix; by default the date",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Announce the markers; choose the seed, once for all workers."""
    global _tier  # `examples` is called while modules are imported
    config.addinivalue_line("markers", "slow: not in the quick tier")
    config.addinivalue_line("markers", "by_turns: every eighth day in the quick tier, else only in the whole")
    config.addinivalue_line(
        "markers", "matrix(cover=None, size=1): but for the whole, a sample of the cases runs"
    )
    config.addinivalue_line("markers", "every_kernel: the quick tier runs it on the older ipykernel as well")
    if config.option.matrix_seed is None:
        config.option.matrix_seed = int(f"{datetime.datetime.now(datetime.UTC):%Y%m%d}")
    _tier = config.option.tier
    config.stash[_durations] = defaultdict(float)


def pytest_report_header(config: pytest.Config) -> str:
    """Return what repeats this choice of tests."""
    return f"tier: {config.option.tier}; matrices by --matrix-seed {config.option.matrix_seed}"


def examples(count: int) -> int:
    """Return how many examples hypothesis tries in this tier, instead of `count` in the whole."""
    return min(count, QUICK_EXAMPLES) if _tier == QUICK else count


def sample(cases: Sequence[Mapping[str, str]], chance: random.Random, size: int = 1) -> frozenset[int]:
    """Return indices of cases in which each value of each parameter occurs, at least `size` of them."""
    order = list(range(len(cases)))
    chance.shuffle(order)
    missing = {pair for case in cases for pair in case.items()}
    taken: list[int] = []
    while missing:
        best = max(order, key=lambda index: len(missing.intersection(cases[index].items())))
        taken.append(best)
        order.remove(best)
        missing.difference_update(cases[best].items())
    taken += order[: max(0, size - len(taken))]
    return frozenset(taken)


def _chance(config: pytest.Config, name: str) -> random.Random:
    return random.Random(zlib.crc32(f"{config.option.matrix_seed} {name}".encode()))


def left_out(
    config: pytest.Config, items: Sequence[pytest.Item]
) -> tuple[set[pytest.Item], set[pytest.Item]]:
    """Return the items that the quick tier leaves out, and those of them that only the whole runs."""
    slow = {item for item in items if _is_slow(item)}
    matrices: dict[str, list[pytest.Function]] = defaultdict(list)
    older: list[pytest.Item] = []
    for item in items:
        marker = item.get_closest_marker("matrix")
        parameters = item.callspec.params if hasattr(item, "callspec") else {}
        if not {"any_kernel", "module_kernel"}.isdisjoint(parameters) and "6.31" in parameters.values():
            if item.get_closest_marker("every_kernel") is None:
                older.append(item)
        elif marker is not None and isinstance(item, pytest.Function):
            across = marker.kwargs.get("across_classes", False)
            name = item.originalname if across else item.nodeid.partition("[")[0]
            matrices[f"{name} {parameters.get('repetition', 0)}"].append(item)
    only_whole = _without_share(config, "6.31", older)
    only_whole |= {item for item in slow if not _is_slow_with_its_turn(item)}
    out = slow.union(older)
    for name, group in matrices.items():
        marker = group[0].get_closest_marker("matrix")
        assert marker is not None
        for is_slow in (True, False):
            cases = [item for item in group if (item in slow) is is_slow]
            values = [_values(item, marker.kwargs.get("cover")) for item in cases]
            taken = sample(values, _chance(config, name), marker.kwargs.get("size", 1))
            unused = [item for index, item in enumerate(cases) if index not in taken]
            out.update(unused)
            only_whole.update(unused if is_slow else _without_share(config, name, unused))
    return out, only_whole


def _is_slow(item: pytest.Item) -> bool:
    """Return whether the quick tier of this day leaves a test out as a whole."""
    if item.get_closest_marker("by_turns") is not None and not _has_turn(item, TURNS):
        return True
    return item.get_closest_marker("slow") is not None


def _is_slow_with_its_turn(item: pytest.Item) -> bool:
    return item.get_closest_marker("slow") is not None and _has_turn(item, REST_SHARE)


def _has_turn(item: pytest.Item, days: int) -> bool:
    """Return whether it is a test's turn, which comes once in so many days."""
    name = item.nodeid.partition("[")[0]
    seed: int = item.config.option.matrix_seed
    return (zlib.crc32(name.encode()) + seed) % days == 0


def _without_share(config: pytest.Config, name: str, left: Sequence[pytest.Item]) -> set[pytest.Item]:
    """Return what the rest leaves out of what the quick tier left."""
    share = _chance(config, f"rest {name}").sample(range(len(left)), -(-len(left) // REST_SHARE))
    return {item for index, item in enumerate(left) if index not in share}


def _thins_itself(item: pytest.Item) -> bool:
    """Return whether this test does less in the quick tier than in the whole."""
    in_a_loop = "sampled" in getattr(item, "fixturenames", ())
    return in_a_loop or getattr(getattr(item, "obj", None), "is_hypothesis_test", False)


def _values(item: pytest.Function, cover: Iterable[str] | None) -> dict[str, str]:
    values = item.callspec.params if hasattr(item, "callspec") else {}
    return {name: repr(values[name]) for name in (values if cover is None else cover)}


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect what is not of this tier."""
    total = len(items)
    if config.option.tier != ALL:
        out, only_whole = left_out(config, items)
        if config.option.tier == REST:
            out = only_whole | {item for item in items if item not in out and not _thins_itself(item)}
        config.hook.pytest_deselected(items=[item for item in items if item in out])
        items[:] = [item for item in items if item not in out]
    config.stash[_counts] = (len(items), total)


@pytest.fixture
def sampled(request: pytest.FixtureRequest) -> Callable[..., list[Any]]:
    """Return a function that thins a test's own loop: ``sampled(cases, one_in=7)``.

    In the quick tier (for a slow test: in the rest) it returns every seventh case, from the first, second …
    by the seed; otherwise all.
    """
    thinned_in = REST if _is_slow(request.node) else QUICK

    def take(cases: Sequence[_T], one_in: int) -> list[_T]:
        if request.config.option.tier != thinned_in:
            return list(cases)
        first = _chance(request.config, request.node.nodeid).randrange(min(one_in, max(1, len(cases))))
        return list(itertools.islice(cases, first, None, one_in))

    return take


# -- the quick tier stays quick ------------------------------------------------------------------------------


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
    """Fail a test of the quick tier that is not quick."""
    report: pytest.TestReport = yield
    durations = item.config.stash[_durations]
    durations[item.nodeid] += call.duration
    seconds = durations[item.nodeid]
    if (
        report.when == "teardown"
        and report.passed
        and item.config.option.tier == QUICK
        and item.get_closest_marker("stress") is None
        and seconds > FAIL_SECONDS * processes.patience()
    ):
        report.outcome = "failed"
        report.longrepr = f"took {seconds:.1f} s, more than {FAIL_SECONDS:g} s: mark it `slow`"
    return report


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Add up what a test took (in the process that reports, whichever worker ran it)."""
    _reported[report.nodeid] = _reported.get(report.nodeid, 0.0) + report.duration


_reported: dict[str, float] = {}


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Name the tests of the quick tier that took long, and how many tests this tier is."""
    if config.option.tier != QUICK:
        return
    long = sorted((seconds, name) for name, seconds in _reported.items() if seconds > WARN_SECONDS)
    for seconds, name in reversed(long):
        terminalreporter.write_line(f"{seconds:.1f} s, long for the quick tier: {name}", yellow=True)
    chosen, total = config.stash.get(_counts, (0, 0))
    if total:
        terminalreporter.write_line(f"quick tier: {chosen} of {total} tests; `make test-all` runs every one")


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: object) -> None:
    """Take over what a worker counted (pytest-xdist)."""
    counts = getattr(node, "workeroutput", {}).get("tier_counts")
    if counts is not None:
        node.config.stash[_counts] = tuple(counts)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Give the controller what this worker counted."""
    output = getattr(session.config, "workeroutput", None)
    if output is not None:
        output["tier_counts"] = session.config.stash.get(_counts, (0, 0))
