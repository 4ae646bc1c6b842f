"""The pytest plugin: every test under the leak check and the hang watchdog.

Markers
-------
``time_limit(seconds)``
    This test may take longer than `watchdog.LIMIT_SECONDS`; it never passes by running into the limit.
``may_leave(*kinds, reason)``
    These kinds of `leaks.Leak` (``stderr`` for words on stderr) are no leak here; the reason is required.
``alone``
    This test measures time: while it runs, no other worker of pytest-xdist runs a test.

Tiers, and the markers ``slow`` and ``matrix``, are of `nbparallel.testing.tiers`.  Each worker of
pytest-xdist marks its processes by itself and answers for its own.
"""

from __future__ import annotations

import gc
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Generator, Iterator
from multiprocessing.process import current_process
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any

import pytest

from nbparallel.testing import processes
from nbparallel.testing.kernel import Kernel
from nbparallel.testing.leaks import LeakCheck, suspicious_words
from nbparallel.testing.turns import Turns, promised  # noqa: F401  a fixture
from nbparallel.testing.watchdog import LIMIT_SECONDS, Watchdog, original_stderr

pytest_plugins = ["nbparallel.testing.tiers", "nbparallel.testing.sessions"]

BUSY_LIMIT_FACTOR = 3.0
"""On a busy core everything takes at least twice as long; limits grow by this."""
_SPIN = """
import os, sys
if pid := os.fork():
    print(pid)
    sys.exit()
os.close(1)
while os.path.exists(f"/proc/{sys.argv[1]}"): sum(range(10_000))
"""


def add_options(parser: pytest.Parser) -> None:
    """Add ``--repeat`` and ``--busy-core``."""
    group = parser.getgroup("nbparallel")
    group.addoption("--repeat", type=int, default=1, metavar="N", help="run every selected test N times")
    group.addoption(
        "--busy-core", action="store_true", help="pin everything to one core, beside a process that spins"
    )


class BusyCore:
    """Pins this process, and so all that it starts, to one core, and keeps that core busy.

    The process that spins is no descendant and has no mark: tests look whether any is left of either.
    """

    def __init__(self) -> None:
        core = min(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {core})
        unmarked = {name: value for name, value in os.environ.items() if name != processes.MARK}
        command = [sys.executable, "-I", "-S", "-c", _SPIN, str(os.getpid())]
        started = subprocess.run(command, env=unmarked, stdout=subprocess.PIPE, check=True)
        self._spinner = os.pidfd_open(int(started.stdout))

    def close(self) -> None:
        """End the spinning process; the pinning stays."""
        signal.pidfd_send_signal(self._spinner, signal.SIGKILL)
        os.close(self._spinner)


WATCHDOG = pytest.StashKey[Watchdog]()
_hung = pytest.StashKey[str]()
failed = pytest.StashKey[bool]()
"""Set on a test's node when the test has failed."""
_busy_core = pytest.StashKey[BusyCore]()
_turns = pytest.StashKey[Turns]()
_left_by_workers = pytest.StashKey[list[str]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options that make tests harder."""
    add_options(parser)


def pytest_configure(config: pytest.Config) -> None:
    """Announce the markers, mark this run for all processes below it."""
    config.addinivalue_line("markers", f"time_limit(seconds): may take longer than {LIMIT_SECONDS:g} s")
    config.addinivalue_line("markers", "once: is long by itself; --repeat leaves it alone")
    config.addinivalue_line("markers", "alone: measures time; no other worker runs a test beside it")
    config.addinivalue_line("markers", "may_leave(*kinds, reason): what is no leak in this test, and why")
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # by a shell that started this run behind "&"
        signal.signal(signal.SIGINT, signal.default_int_handler)
    started = processes.read(os.getpid())
    # a run below a run (a test of this plugin), and each worker, gets a mark of its own
    os.environ[processes.MARK] = f"{os.getpid()}-{started.started if started else 0}"
    config.stash[WATCHDOG] = Watchdog(_fail, original_stderr())
    config.stash[_left_by_workers] = []
    worker: dict[str, Any] | None = getattr(config, "workerinput", None)
    if worker is not None:
        config.stash[_turns] = Turns(worker["testrunuid"])
    elif config.getoption("--busy-core"):
        config.stash[_busy_core] = BusyCore()
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


@pytest.hookimpl(tryfirst=True)  # before parametrised fixtures: the number stands first in a test's name
def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run every test ``--repeat`` times, but for those that are marked ``once``."""
    count = metafunc.config.getoption("--repeat")
    if count > 1 and metafunc.definition.get_closest_marker("once") is None:
        metafunc.fixturenames.append("repetition")
        metafunc.parametrize("repetition", range(count))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Exempt what is there before the first test from garbage collections: tests make thousands of them."""
    gc.collect()
    gc.freeze()


def _fail(text: str) -> None:
    pytest.fail(text, pytrace=True)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Set up, call and tear down under one limit, when this test's turn has come."""
    watchdog = item.config.stash[WATCHDOG]
    turns = item.config.stash.get(_turns, None)
    if turns is not None:
        turns.begin(alone=item.get_closest_marker("alone") is not None)
    marker = item.get_closest_marker("time_limit")
    limit = float(marker.args[0]) if marker else LIMIT_SECONDS
    factor = BUSY_LIMIT_FACTOR if _busy_core in item.config.stash else processes.patience()
    watchdog.arm(item.nodeid, limit * factor)
    try:
        return (yield)
    finally:
        watchdog.disarm()
        if turns is not None:
            turns.end()


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
    if any(leak.kind == "name" for leak in leaks):
        _wait_for_other_workers(request.config)
        leaks = check.settle(allowed=allowed)
    check.end_processes()
    if leaks:
        pytest.fail(
            "the test left behind:\n" + "\n".join(f"  {leak.kind}: {leak.text}" for leak in leaks),
            pytrace=False,
        )


def _wait_for_other_workers(config: pytest.Config) -> None:
    """Let the tests of other workers end: what a process of theirs that is dead has named looks like ours.

    Some of them kill a kernel with its supervisor, and remove its names only at their end.
    """
    turns = config.stash.get(_turns, None)
    if turns is not None:
        with config.stash[WATCHDOG].waiting():
            turns.end()
            turns.begin(alone=True)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail the run if a process of it is still there when all fixtures are gone."""
    if _busy_core in session.config.stash:
        session.config.stash[_busy_core].close()
    left = list(processes.family(os.getpid(), os.environ[processes.MARK]))
    processes.kill(left)
    processes.reap(left)
    texts: list[str] = [str(record) for record in left]
    if _turns in session.config.stash:
        session.config.stash[_turns].close()
        session.config.workeroutput["left"] = texts  # type: ignore[attr-defined]  # pytest-xdist's
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


def old_ipykernel() -> Path:
    """Return the folder of the older ipykernel that tests also run with.

    ``pip install --target FOLDER --no-deps ipykernel==6.31.0`` makes it; the Makefile does.
    """
    return Path(os.environ.get("NBP_OLD_IPYKERNEL", Path(sys.prefix) / "ipykernel-6.31"))


@pytest.fixture
def repetition() -> int:
    """Return which of the ``--repeat`` runs of a test this is."""
    return 0


@pytest.fixture
def kernel() -> Iterator[Kernel]:
    """Start a fresh kernel process of the installed ipykernel."""
    with Kernel() as fresh:
        yield fresh


def _path_of(ipykernel: str) -> list[Path]:
    folder = old_ipykernel()
    if ipykernel != "installed" and not folder.is_dir():
        pytest.skip(f"ipykernel 6.31 is not in {folder}; `make test` puts it there")
    return [] if ipykernel == "installed" else [folder]


@pytest.fixture(params=["installed", "6.31"])
def any_kernel(request: pytest.FixtureRequest) -> Iterator[Kernel]:
    """Start a fresh kernel process, once of the installed ipykernel and once of 6.31."""
    with Kernel(path=_path_of(request.param)) as fresh:
        yield fresh


@pytest.fixture(scope="module", params=["installed", "6.31"])
def module_kernel(request: pytest.FixtureRequest) -> Iterator[tuple[str, list[Kernel]]]:
    """Start one kernel process for a module, of each ipykernel; its list is empty once it is of no use."""
    with Kernel(path=_path_of(request.param)) as kernel:
        yield request.param, [kernel]


@pytest.fixture
def shared_kernel(
    request: pytest.FixtureRequest, module_kernel: tuple[str, list[Kernel]]
) -> Iterator[Kernel]:
    """Return the module's kernel of each ipykernel, reset after every test; for tests that do not end it."""
    ipykernel, usable = module_kernel
    if not usable:
        with Kernel(path=_path_of(ipykernel)) as fresh:
            yield fresh
        return
    yield usable[0]
    if request.node.stash.get(failed, False):
        usable.clear()
    else:
        usable[0].reset()
