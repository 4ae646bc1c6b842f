"""The tiers: a sample that covers, the same for a seed; quick and rest are all but some slow cases."""

from __future__ import annotations

import random
import re
from collections import Counter

import pytest

from nbparallel.testing import tiers

MATRICES = """
import time
import pytest

@pytest.mark.matrix()
@pytest.mark.parametrize("point", range(5))
@pytest.mark.parametrize("size", ["small", "large"])
@pytest.mark.parametrize("shared", [False, True])
def test_every_value(point, size, shared):
    pass

@pytest.mark.matrix(cover=(), size=2)
@pytest.mark.parametrize("kind", range(9))
def test_two(kind):
    pass

@pytest.mark.slow
def test_slow():
    pass

@pytest.mark.by_turns
@pytest.mark.parametrize("kind", range(2))
def test_by_turns(kind):
    pass

@pytest.mark.slow
@pytest.mark.matrix(cover=(), size=3)
@pytest.mark.parametrize("kind", range(8))
def test_slow_three(kind):
    pass

def test_loop(sampled):
    print("taken", sampled(range(70), one_in=7))

@pytest.mark.slow
def test_slow_loop(sampled):
    print("slowly taken", len(sampled(range(70), one_in=7)))

@pytest.mark.parametrize("any_kernel", ["installed", "6.31"])
@pytest.mark.parametrize("kind", range(6))
def test_kernels(any_kernel, kind):
    pass

class Suite:
    @pytest.mark.matrix(cover=(), across_classes=True)
    def test_inherited(self):
        pass

class TestOne(Suite):
    pass

class TestTwo(Suite):
    pass
"""


def chosen(pytester: pytest.Pytester, tier: str, seed: int) -> set[str]:
    """Return the tests of a tier."""
    result = pytester.runpytest_subprocess(
        *("-p", "nbparallel.testing.plugin", "--collect-only", "-q"),
        *("--tier", tier, "--matrix-seed", str(seed)),
        timeout=15,
    )
    return {line.partition("::")[2] for line in result.outlines if "::" in line}


def test_a_sample_holds_every_value() -> None:
    """Each value of each parameter occurs, in hardly more cases than the longest parameter has values."""
    cases = [
        {"point": str(p), "size": str(s), "shared": str(x)} for p in range(6) for s in range(3) for x in "ab"
    ]
    samples = {tiers.sample(cases, random.Random(seed)) for seed in range(50)}
    assert len(samples) > 40, "another one for almost every seed"
    for taken in samples:
        assert {pair for index in taken for pair in cases[index].items()} == {
            p for c in cases for p in c.items()
        }
        assert 6 <= len(taken) <= 9
    assert len(tiers.sample(cases, random.Random(1), size=20)) == 20


def counted(names: set[str]) -> Counter[str]:
    """Return how many cases of each test there are."""
    return Counter(re.sub(r"\[.*", "", name) for name in names)


@pytest.mark.slow
@pytest.mark.time_limit(90)
def test_quick_and_rest_take_of_the_whole(pytester: pytest.Pytester) -> None:
    """In sixteen days each test is in one, but for cases of matrices; loops run in both."""
    pytester.makepyfile(MATRICES)
    whole, quick = (chosen(pytester, tier, 7) for tier in (tiers.ALL, tiers.QUICK))
    assert len(whole) == 20 + 9 + 1 + 2 + 8 + 1 + 1 + 12 + 2
    rests = [chosen(pytester, tiers.REST, seed) for seed in range(7, 23)]
    rest = rests[0]
    for name, number in (("test_slow_three", 3), ("test_slow", 1), ("test_slow_loop", 1)):
        assert sorted(counted(names)[name] for names in rests) == [0] * 15 + [number], "by turns"
    assert counted(rest)["test_two"] == 1, "a sixteenth of those that the quick tier leaves out"
    assert counted(rest)["test_kernels"] == 1
    assert chosen(pytester, tiers.REST, 7) == rest not in rests[1:]
    only_whole = set(counted(whole - quick.union(*rests))) - {"test_by_turns"}
    assert only_whole == {"test_every_value", "test_two", "test_slow_three", "test_kernels"}
    assert quick & rest == {"test_loop"}, "it does more in the whole"
    assert 5 <= counted(quick)["test_every_value"] <= 7
    assert counted(quick)["test_two"] == 2
    assert sum(name.endswith("test_inherited") for name in quick) == 1
    assert chosen(pytester, tiers.QUICK, 7) == quick != chosen(pytester, tiers.QUICK, 8)


@pytest.mark.slow
@pytest.mark.time_limit(90)
def test_turns(pytester: pytest.Pytester) -> None:
    """All cases of a test are quick every eighth day, and never in the rest."""
    pytester.makepyfile(MATRICES)
    days = [
        [counted(chosen(pytester, tier, seed)) for tier in (tiers.QUICK, tiers.REST)] for seed in range(16)
    ]
    found = sorted((quick["test_by_turns"], rest["test_by_turns"]) for quick, rest in days)
    assert found == [(0, 0)] * 14 + [(2, 0)] * 2


@pytest.mark.slow
@pytest.mark.time_limit(90)
@pytest.mark.parametrize(("tier", "cases"), [(tiers.REST, 10), (tiers.ALL, 70)])
def test_a_loop_of_a_slow_test_is_thinned_in_the_rest(
    pytester: pytest.Pytester, tier: str, cases: int
) -> None:
    """The whole tries every case."""
    pytester.makepyfile(MATRICES)
    for seed in map(str, range(7, 23)):  # one is its day
        options = ("-p", "nbparallel.testing.plugin", "-k", "slow_loop", "-s", "--tier", tier)
        result = pytester.runpytest_subprocess(*options, "--matrix-seed", seed, timeout=40)
        if tier == tiers.ALL or result.ret != pytest.ExitCode.NO_TESTS_COLLECTED:
            break
    result.stdout.fnmatch_lines([f"*slowly taken {cases}*"])


WORKERS = """
import os, subprocess, sys, time
import pytest

BUSY = "busy"

@pytest.mark.parametrize("number", range(12))
def test_beside(number):
    with open(f"{BUSY}-{number}", "w"):
        time.sleep(0.05)
    os.unlink(f"{BUSY}-{number}")

@pytest.mark.alone
@pytest.mark.parametrize("number", range(12))
def test_alone(number):
    for _ in range(5):
        assert not [name for name in os.listdir() if name.startswith(BUSY)]
        time.sleep(0.01)

def test_a_process_is_left():
    subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"])

@pytest.mark.parametrize("number", range(5))
def test_a_name_of_another_worker_is_no_leak(number):
    process = subprocess.Popen([sys.executable, "-S", "-c",
        "import mmap, os, sys; path = '/dev/shm/nbp-worker-%d' % os.getpid()\\n"
        "file = open(path, 'w+b'); file.truncate(4096); memory = mmap.mmap(file.fileno(), 4096)\\n"
        "print(flush=True); sys.stdin.read(); os.unlink(path)"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    process.stdout.readline()
    time.sleep(0.05)
    process.communicate()
"""


@pytest.mark.slow
@pytest.mark.time_limit(90)
def test_workers_do_not_meet(pytester: pytest.Pytester) -> None:
    """A test that is `alone` has no test beside it; what a worker's test leaves is that test's leak only."""
    pytest.importorskip("xdist", reason="pytest-xdist is not installed")
    pytester.makepyfile(WORKERS)
    result = pytester.runpytest_subprocess(
        *("-p", "nbparallel.testing.plugin", "-n", "2", "--dist", "worksteal", "-rA"), timeout=60
    )
    result.assert_outcomes(passed=12 + 12 + 1 + 5, errors=1)
    assert "ERROR test_workers_do_not_meet.py::test_a_process_is_left" in result.stdout.str()


PROMISE = """
import time

def test_in_time(promised):
    with promised(0.3):
        time.sleep(0.01)

def test_late(promised):
    with promised(0.1):
        time.sleep(0.15)
"""


@pytest.mark.slow
@pytest.mark.time_limit(90)
def test_repetitions_fail_at_the_promise(pytester: pytest.Pytester) -> None:
    """One run may be late on a shared machine, and says how late; repetitions may not."""
    pytester.makepyfile(PROMISE)
    once = pytester.runpytest_subprocess(
        "-p", "nbparallel.testing.plugin", "--junit-xml", "report.xml", timeout=40
    )
    once.assert_outcomes(passed=2)
    assert re.search(
        r'"seconds of 0.1 promised" value="0\.1[5-9]', (pytester.path / "report.xml").read_text()
    )
    often = pytester.runpytest_subprocess("-p", "nbparallel.testing.plugin", "--repeat", "2", timeout=40)
    often.assert_outcomes(passed=2, failed=2)
