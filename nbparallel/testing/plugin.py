"""The pytest plugin: every test under the leak check.

Markers
-------
``may_leave(*kinds, reason)``
    These kinds of `leaks.Leak` (``stderr`` for words on stderr) are no leak here; the reason is required.

Each worker of pytest-xdist marks its processes by itself and answers for its own.
"""

from __future__ import annotations

import os
import secrets
import shutil
import tempfile
from collections.abc import Generator, Iterator
from multiprocessing.process import current_process
from multiprocessing.util import Finalize
from typing import Any

import pytest

from nbparallel.testing import processes
from nbparallel.testing.leaks import LeakCheck, suspicious_words

NEIGHBOUR_SECONDS = 10.0
"""For a test of another worker of pytest-xdist to end."""
failed = pytest.StashKey[bool]()
"""Set on a test's node when the test has failed."""


def pytest_configure(config: pytest.Config) -> None:
    """Announce the markers, mark this run for all processes below it."""
    config.addinivalue_line("markers", "time_limit(seconds): for a watchdog, if there is one")
    config.addinivalue_line("markers", "may_leave(*kinds, reason): what is no leak in this test, and why")
    started = processes.read(os.getpid())
    # a run below a run (a test of this plugin), and each worker, gets a mark of its own
    os.environ[processes.MARK] = f"{os.getpid()}-{started.started if started else 0}"
    _use_own_folder(config)


def _use_own_folder(config: pytest.Config) -> None:
    """Give this run a temporary folder and names of semaphores: what other programs leave is no leak of ours.

    pytest's folder stays where it was.
    """
    this: Any = current_process()
    this._config["semprefix"] = f"/nbp-{secrets.token_hex(7)}"
    before = tempfile.tempdir, os.environ.get("TMPDIR")
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())
    folder = os.environ["TMPDIR"] = tempfile.tempdir = tempfile.mkdtemp(prefix="run-")

    def restore() -> None:
        tempfile.tempdir, place = before
        if place is None:
            del os.environ["TMPDIR"]
        else:
            os.environ["TMPDIR"] = place

    config.add_cleanup(restore)
    # behind what multiprocessing itself removes there (at -100), and not in a forked child
    Finalize(None, shutil.rmtree, (folder, True), exitpriority=-200)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Fail a test whose stderr reports a leak."""
    report = yield
    if report.failed:
        item.stash[failed] = True
    if report.when == "teardown" and report.passed and not item.stash.get(failed, False):
        lines = suspicious_words(report.capstderr)
        if lines and "stderr" not in _allowed(item):
            report.outcome = "failed"
            report.longrepr = "stderr reports a leak:\n" + "\n".join(lines)
    return report


def _allowed(item: pytest.Item) -> frozenset[str]:
    kinds: set[str] = set()
    for marker in item.iter_markers("may_leave"):
        if not marker.kwargs.get("reason"):
            raise pytest.UsageError(f"{item.nodeid}: may_leave needs reason=…")
        kinds.update(marker.args)
    return frozenset(kinds)


@pytest.fixture(autouse=True)
def nothing_leaks(request: pytest.FixtureRequest) -> Iterator[LeakCheck]:
    """Fail the test if processes, names, descriptors, mappings or threads stay behind it.

    A test that failed already is only cleaned up after: its traceback holds on to what it used.
    """
    check = LeakCheck()
    yield check
    if request.node.stash.get(failed, False):
        check.end_processes()
        return
    allowed = _allowed(request.node)
    leaks = check.settle(allowed=allowed)
    if any(leak.kind == "name" for leak in leaks) and hasattr(request.config, "workerinput"):
        # a test of another worker may have killed a kernel with its supervisor: its names look like ours
        # until it ends, which removes them
        leaks = check.settle(allowed=allowed, grace_seconds=NEIGHBOUR_SECONDS)
    check.end_processes()
    if leaks:
        pytest.fail(
            "the test left behind:\n" + "\n".join(f"  {leak.kind}: {leak.text}" for leak in leaks),
            pytrace=False,
        )
