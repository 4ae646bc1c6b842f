"""The tiers: a sample that covers, the same for a seed; quick and rest are all but some slow cases."""

from __future__ import annotations

import random
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.harness import tiers

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


HARNESS = ("-p", "nbparallel.testing.plugin")
for _name in ("watchdog", "tiers", "turns", "repetitions"):
    HARNESS += ("-p", f"tests.harness.{_name}")


def chosen(pytester: pytest.Pytester, tier: str, seed: int) -> set[str]:
    """Return the tests of a tier."""
    options = ("--collect-only", "-q", "--tier", tier, "--seed", str(seed))
    result = pytester.runpytest_subprocess(*HARNESS, *options, timeout=15)
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
    """The choice is the same each time; another seed makes another; loops run in both."""
    pytester.makepyfile(MATRICES)
    whole, quick = (chosen(pytester, tier, 7) for tier in (tiers.ALL, tiers.QUICK))
    assert len(whole) == 20 + 9 + 1 + 8 + 1 + 1 + 12 + 2
    assert 5 <= counted(quick)["test_every_value"] <= 7
    assert counted(quick)["test_two"] == 2
    assert counted(quick)["test_kernels"] == 6, "on the installed one alone"
    assert not {"test_slow", "test_slow_three", "test_slow_loop"} & counted(quick).keys()
    assert sum(name.endswith("test_inherited") for name in quick) == 1
    assert chosen(pytester, tiers.QUICK, 7) == quick != chosen(pytester, tiers.QUICK, 8)
    rests = [chosen(pytester, tiers.REST, seed) for seed in range(12)]
    assert all(rest & quick == {"test_loop"} for rest in rests[7:8]), "it does more in the whole"
    assert chosen(pytester, tiers.REST, 0) == rests[0]
    shares = [len(rest) for rest in rests]
    assert len(whole) / 32 < sum(shares) / len(shares) < len(whole) / 6, "a sixteenth, and the loop"
    assert max(counted(rest)["test_slow_three"] for rest in rests) <= 3


@pytest.mark.slow
@pytest.mark.time_limit(90)
def test_quick_leaves_out_rooms_beside_unless_they_are_named(pytester: pytest.Pytester) -> None:
    """`make test` is of cells; a room that is named runs, and the rest runs all of them."""
    here = tiers.BESIDE[0]
    root = Path(tiers.__file__).parents[2]
    for options, found in (([], False), ([f"tests/{here}"], True)):
        command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "--tier", "quick", *options]
        listed = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=80, check=True)
        assert (f"tests/{here}/" in listed.stdout) is found


@pytest.mark.slow
@pytest.mark.time_limit(90)
@pytest.mark.parametrize(("tier", "cases"), [(tiers.REST, 10), (tiers.ALL, 70)])
def test_a_loop_of_a_slow_test_is_thinned_in_the_rest(
    pytester: pytest.Pytester, tier: str, cases: int
) -> None:
    """The whole tries every case."""
    pytester.makepyfile(MATRICES)
    for seed in map(str, range(60)):  # one has it in the rest
        options = ("-k", "slow_loop", "-s", "--tier", tier, "--seed", seed)
        result = pytester.runpytest_subprocess(*HARNESS, *options, timeout=40)
        if result.ret != pytest.ExitCode.NO_TESTS_COLLECTED:
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
    result = pytester.runpytest_subprocess(*(*HARNESS, "-n", "2", "--dist", "worksteal", "-rA"), timeout=60)
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
    once = pytester.runpytest_subprocess(*HARNESS, "--junit-xml", "report.xml", timeout=40)
    once.assert_outcomes(passed=2)
    assert re.search(
        r'"seconds of 0.1 promised" value="0\.1[5-9]', (pytester.path / "report.xml").read_text()
    )
    repeated = ("--repeat", "2")
    often = pytester.runpytest_subprocess(*HARNESS, *repeated, timeout=40)
    often.assert_outcomes(passed=2, failed=2)
