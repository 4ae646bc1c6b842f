"""The pytest plugin: every test under the leak check and the hang watchdog.

Markers
-------
``time_limit(seconds)``
    This test may take longer than `watchdog.LIMIT_SECONDS`; it never passes by running into the limit.
``may_leave(*kinds, reason)``
    These kinds of `leaks.Leak` (``stderr`` for words on stderr) are no leak here; the reason is required.

Each worker of pytest-xdist marks its processes by itself and answers for its own.
"""

from __future__ import annotations

import gc
import os
import secrets
import shutil
import signal
import tempfile
from collections.abc import Generator, Iterator
from multiprocessing.process import current_process
from multiprocessing.util import Finalize
from typing import Any

import pytest

from nbparallel.testing import processes
from nbparallel.testing.leaks import LeakCheck, suspicious_words
from nbparallel.testing.watchdog import LIMIT_SECONDS, Watchdog, original_stderr

WATCHDOG = pytest.StashKey[Watchdog]()
_hung = pytest.StashKey[str]()
failed = pytest.StashKey[bool]()
"""Set on a test's node when the test has failed."""
LIMIT_FACTOR = pytest.StashKey[float]()
"""Set in a configuration's stash: what multiplies the limit of every test, whatever the machine's load."""
_left_by_workers = pytest.StashKey[list[str]]()


def pytest_configure(config: pytest.Config) -> None:
    """Announce the markers, mark this run for all processes below it."""
    config.addinivalue_line("markers", f"time_limit(seconds): may take longer than {LIMIT_SECONDS:g} s")
    config.addinivalue_line("markers", "may_leave(*kinds, reason): what is no leak in this test, and why")
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # by a shell that started this run behind "&"
        signal.signal(signal.SIGINT, signal.default_int_handler)
    started = processes.read(os.getpid())
    # a run below a run (a test of this plugin), and each worker, gets a mark of its own
    os.environ[processes.MARK] = f"{os.getpid()}-{started.started if started else 0}"
    config.stash[WATCHDOG] = Watchdog(_fail, original_stderr())
    config.stash[_left_by_workers] = []
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


def pytest_collection_finish(session: pytest.Session) -> None:
    """Exempt what is there before the first test from garbage collections: tests make thousands of them."""
    gc.collect()
    gc.freeze()


def _fail(text: str) -> None:
    pytest.fail(text, pytrace=True)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Set up, call and tear down under one limit."""
    watchdog = item.config.stash[WATCHDOG]
    marker = item.get_closest_marker("time_limit")
    limit = float(marker.args[0]) if marker else LIMIT_SECONDS
    factor = item.config.stash.get(LIMIT_FACTOR, processes.patience())
    watchdog.arm(item.nodeid, limit * factor)
    try:
        return (yield)
    finally:
        watchdog.disarm()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None, object, object]:
    """Watch what a test that hung does at its end."""
    item.config.stash[WATCHDOG].resume()
    return (yield)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Fail a test that swallowed the watchdog's exception, or whose stderr reports a leak."""
    watchdog = item.config.stash[WATCHDOG]
    with watchdog.paused():
        report = yield
    if watchdog.expired and watchdog.name == item.nodeid and report.passed and not item.stash.get(_hung, ""):
        report.outcome, report.longrepr = "failed", watchdog.expired
    if watchdog.expired and watchdog.name == item.nodeid:
        item.stash[_hung] = watchdog.expired
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
        with request.config.stash[WATCHDOG].waiting():
            leaks = check.settle(allowed=allowed, grace_seconds=LIMIT_SECONDS)
    check.end_processes()
    if leaks:
        pytest.fail(
            "the test left behind:\n" + "\n".join(f"  {leak.kind}: {leak.text}" for leak in leaks),
            pytrace=False,
        )


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail the run if a process of it is still there when all fixtures are gone."""
    left = list(processes.family(os.getpid(), os.environ[processes.MARK]))
    processes.kill(left)
    processes.reap(left)
    texts: list[str] = [str(record) for record in left]
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["left"] = texts
    of_workers: list[str] = session.config.stash[_left_by_workers]
    texts += of_workers
    if texts:
        reporter = session.config.pluginmanager.get_plugin("terminalreporter")
        if reporter is not None:
            lines = "\n".join(f"  {text}" for text in texts)
            reporter.write_line(f"\nprocesses of this run were still there (now killed):\n{lines}", red=True)
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: object) -> None:
    """Note which processes a worker of pytest-xdist left behind."""
    node.config.stash[_left_by_workers] += getattr(node, "workeroutput", {}).get("left", [])
