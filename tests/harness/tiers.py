"""Three tiers of tests: a quick one before each commit, a part of what it left out, and all tests.

``--tier quick`` leaves out tests marked ``slow`` and thins matrices, and where no path is named the rooms of
`BESIDE`; ``--tier rest`` runs the quick tests of those, a sixteenth of the slow ones and of the cases that
were left out of matrices; ``--tier all``, the default, runs every test.  The choice is the same each day, so
that what failed on Tuesday fails on Wednesday; ``--seed N`` makes another.

Markers
-------
``slow``
    Not in the quick tier: of more than half a second, and not the first to show that a promise is broken.
``matrix(cover=None, size=1, across_classes=False)``
    The quick tier runs a sample of this test's parametrised cases: at least `size`, and each value of each
    parameter that `cover` names at least once (None: of every parameter).  With `across_classes` the cases
    are those of all classes that inherit the test.  Of a test that is ``slow`` as well, the rest runs at
    most this sample.
``every_kernel``
    The quick tier runs this test on the older ipykernel as well (fixtures ``any_kernel``, ``shared_kernel``).

Tests that loop over their cases take them from the fixture `sampled`, examples of hypothesis are counted by
`examples`.
"""

from __future__ import annotations

import itertools
import random
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import pytest

QUICK, REST, ALL = "quick", "rest", "all"
REST_SHARE = 16
"""Of slow tests, and of the cases that the quick tier leaves out of a matrix, the rest is one in so many: on
two slow cores that is what `.ci/run` has time for."""
BESIDE = (
    "architecture", "cluster", "docs", "harness", "multiprocessing",
    "distributed/bootstrap", "distributed/models", "distributed/races",
)  # fmt: skip
"""Folders of tests that say nothing of a cell without a flag, several hosts, or processes of one's own."""
QUICK_EXAMPLES = 20
"""Examples of hypothesis for one test of the quick tier."""
_TESTS = Path(__file__).parents[1]
_T = TypeVar("_T")
_tier = ALL


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--tier`` and ``--seed``."""
    group = parser.getgroup("nbparallel")
    tiers = (QUICK, REST, ALL)
    group.addoption("--tier", choices=tiers, default=ALL, help="quick tests, a part of the others, or all")
    group.addoption("--beside", action="store_true", help="the quick tier has the tests of all rooms")
    group.addoption("--seed", type=int, default=0, metavar="N", help="another choice of tests for a tier")


def pytest_configure(config: pytest.Config) -> None:
    """Announce the markers."""
    global _tier  # `examples` is called while modules are imported
    config.addinivalue_line("markers", "slow: not in the quick tier")
    config.addinivalue_line(
        "markers", "matrix(cover=None, size=1): but for the whole, a sample of the cases runs"
    )
    config.addinivalue_line("markers", "every_kernel: the quick tier runs it on the older ipykernel as well")
    _tier = config.option.tier
    if config.args_source is pytest.Config.ArgsSource.ARGS:
        config.option.beside = True  # workers of pytest-xdist take this over


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
    return random.Random(zlib.crc32(f"{config.option.seed} {name}".encode()))


def _in_rest(item: pytest.Item) -> bool:
    """Return whether a test, or a case, is of the share of the rest."""
    return _chance(item.config, item.nodeid).randrange(REST_SHARE) == 0


def left_out(items: Sequence[pytest.Item]) -> tuple[set[pytest.Item], set[pytest.Item]]:
    """Return the items that the quick tier leaves out, and those of them that only the whole runs."""
    out: set[pytest.Item] = set()
    only_whole: set[pytest.Item] = set()
    matrices: dict[tuple[object, ...], list[pytest.Function]] = defaultdict(list)
    for item in items:
        marker = item.get_closest_marker("matrix")
        slow = item.get_closest_marker("slow") is not None
        parameters = item.callspec.params if hasattr(item, "callspec") else {}
        older = not {"any_kernel", "module_kernel"}.isdisjoint(parameters) and "6.31" in parameters.values()
        if older and item.get_closest_marker("every_kernel") is None:
            out.add(item)
        elif marker is not None and isinstance(item, pytest.Function):
            across = marker.kwargs.get("across_classes", False)
            name = item.originalname if across else item.nodeid.partition("[")[0]
            matrices[name, parameters.get("repetition", 0), slow].append(item)
        elif slow:
            out.add(item)
        if item in out and not _in_rest(item):
            only_whole.add(item)
    for (name, repetition, slow), cases in matrices.items():
        marker = cases[0].get_closest_marker("matrix")
        assert marker is not None
        values = [_values(item, marker.kwargs.get("cover")) for item in cases]
        taken = sample(values, _chance(cases[0].config, f"{name} {repetition}"), marker.kwargs.get("size", 1))
        unused = {item for index, item in enumerate(cases) if index not in taken}
        if slow:
            out.update(cases)
            only_whole |= unused | {item for item in cases if not _in_rest(item)}
        else:
            out |= unused
            only_whole |= {item for item in unused if not _in_rest(item)}
    return out, only_whole


def _is_beside(item: pytest.Item) -> bool:
    return item.path.relative_to(_TESTS).as_posix().startswith(tuple(f"{room}/" for room in BESIDE))


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
    if config.option.tier == ALL:
        return
    out, only_whole = left_out(items)
    beside = {item for item in items if item.path.is_relative_to(_TESTS) and _is_beside(item)}
    if config.option.tier == REST:
        quick = {item for item in items if item not in out and not _thins_itself(item)}
        out = only_whole | (quick - beside)
    elif not config.option.beside:
        out |= beside
    config.hook.pytest_deselected(items=[item for item in items if item in out])
    items[:] = [item for item in items if item not in out]


@pytest.fixture
def sampled(request: pytest.FixtureRequest) -> Callable[..., list[Any]]:
    """Return a function that thins a test's own loop: ``sampled(cases, one_in=7)``.

    In the quick tier (for a slow test: in the rest) it returns every seventh case, from the first, second …
    by the test's name; otherwise all.
    """
    thinned_in = QUICK if request.node.get_closest_marker("slow") is None else REST

    def take(cases: Sequence[_T], one_in: int) -> list[_T]:
        if request.config.option.tier != thinned_in:
            return list(cases)
        first = _chance(request.config, request.node.nodeid).randrange(min(one_in, max(1, len(cases))))
        return list(itertools.islice(cases, first, None, one_in))

    return take
