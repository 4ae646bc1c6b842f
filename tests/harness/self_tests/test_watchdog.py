"""A test that hangs is dumped, ended and failed; it never passes by running into the limit."""

import re
import signal

import pytest

from nbparallel.testing import processes
from nbparallel.testing.waiting import wait_until

PLUGINS = ("-p", "nbparallel.testing.plugin", "-p", "tests.harness.watchdog")

HANGING = """
import os, subprocess, sys, threading, time
import pytest
from nbparallel.testing import processes

processes.MOST_PATIENCE = 1.0

@pytest.mark.time_limit(1.0)
def test_waits_for_ever():
    threading.Event().wait()

@pytest.mark.time_limit(1.0)
def test_waits_for_a_child():
    code = "def asleep(): import time; time.sleep(600)\\nasleep()"
    subprocess.run([sys.executable, "-X", "faulthandler", "-c", code])

@pytest.mark.time_limit(1.0)
def test_swallows_everything():
    try:
        time.sleep(600)
    except BaseException:
        pass

@pytest.mark.time_limit(1.0)
def test_child_ignores_signals():
    if (pid := os.fork()) == 0:
        import signal
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGABRT):
            signal.signal(number, signal.SIG_IGN)
        while True:
            time.sleep(600)
    os.waitpid(pid, 0)

def test_after_a_hang_others_run():
    assert True
"""


@pytest.mark.slow
@pytest.mark.time_limit(60)
def test_hangs_are_caught(pytester: pytest.Pytester) -> None:
    """A hang fails within its limit, whatever it waits for; stacks are printed, and the run goes on."""
    pytester.makepyfile(HANGING)
    result = pytester.runpytest_subprocess(*PLUGINS, timeout=50)
    result.assert_outcomes(passed=1, failed=4)
    said = result.stderr.str() + result.stdout.str()
    assert said.count(" hung: not finished after 1 s ===") == 4
    assert "in asleep" in said, "the child's own stack"
    assert "in test_waits_for_ever" in said, "our own stack"


STUCK = """
import ctypes
from tests.harness import watchdog
import pytest

watchdog.LAST_RESORT_SECONDS = 1.0

@pytest.mark.time_limit(0.5)
def test_c_code_that_never_returns():
    libc = ctypes.PyDLL(None)  # holds the GIL
    libc.sleep(30)  # the timer's signal ends this one, and the handler cannot run yet
    libc.sleep(30)
"""


@pytest.mark.time_limit(60)
def test_stuck_in_c_ends_the_run(pytester: pytest.Pytester) -> None:
    """C code that holds the GIL cannot be raised into: the run prints its stacks and ends."""
    pytester.makepyfile(STUCK)
    result = pytester.runpytest_subprocess(*PLUGINS, timeout=40)
    assert result.ret != 0
    assert "test_c_code_that_never_returns" in result.stderr.str()


REPEATED = """
import os

import pytest
from nbparallel.testing import processes

def test_where_am_i():
    assert len(os.sched_getaffinity(0)) == 1
    assert list(processes.family(os.getpid(), os.environ[processes.MARK])) == []
    records = filter(None, map(processes.read, processes.pids()))
    spinning = [r.pid for r in records if r.command.endswith(f" {os.getpid()}")]
    print("spinning:", *spinning)

@pytest.mark.once
def test_long_by_itself():
    pass
"""


@pytest.mark.slow
@pytest.mark.time_limit(60)
def test_tests_can_be_made_harder(pytester: pytest.Pytester) -> None:
    """`--repeat` runs a test many times, `--busy-core` on one core, beside a process of no run."""
    pytester.makepyfile(REPEATED)
    options = (*PLUGINS, "-p", "tests.harness.repetitions")
    options += ("--repeat", "5", "--busy-core", "-s")
    result = pytester.runpytest_subprocess(*options, timeout=40)
    result.assert_outcomes(passed=5 + 1)
    (spinning,) = set(re.findall(r"spinning: (\d+)", result.stdout.str()))
    wait_until(lambda: processes.read(int(spinning)) is None, "the process spins on")
    assert "still there" not in result.stdout.str()


INTERRUPTED = """
import os, signal
import pytest

def test_interrupted():
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)
"""


@pytest.mark.slow
def test_a_run_in_the_background_can_be_interrupted(pytester: pytest.Pytester) -> None:
    """A shell has what stands before its "&" ignore SIGINT; tests send it to themselves all the same."""
    pytester.makepyfile(INTERRUPTED)
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        result = pytester.runpytest_subprocess(*PLUGINS, timeout=20)
    finally:
        signal.signal(signal.SIGINT, before)
    result.assert_outcomes(passed=1)


SLOW_REPORT = """
import time
import pytest
from nbparallel.testing import processes
from tests.harness import watchdog

processes.MOST_PATIENCE, watchdog.REPEAT_SECONDS = 1.0, 0.05

class Slow:
    def __repr__(self):
        time.sleep(0.3)
        return "slow to describe"

@pytest.mark.time_limit(0.3)
def test_hangs():
    slow = Slow()
    while slow: pass

def test_after_it():
    pass
"""


@pytest.mark.slow
@pytest.mark.time_limit(60)
def test_a_hang_is_described_however_long_that_takes(pytester: pytest.Pytester) -> None:
    """The watchdog does not raise again inside the runner, which would end the run."""
    pytester.makepyfile(SLOW_REPORT)
    result = pytester.runpytest_subprocess(*PLUGINS, "-l", timeout=40)
    result.assert_outcomes(failed=1, passed=1)
    result.stdout.fnmatch_lines(["*slow to describe*"])
