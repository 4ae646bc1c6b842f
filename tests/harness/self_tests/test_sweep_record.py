"""The record of the long runs: nothing counts that should not."""

from __future__ import annotations

import pytest

from tests.faults.sweep.sweep_record import BEGIN, BUSY, END, PLAIN, Runs, green, merge, read, renew, table

TEST = "tests/faults/test_x.py::test_y[a]"


def test_a_failure_sets_the_count_back_until_another_commit():
    """What passed before a failure, or on the commit that failed, shows nothing about the repair."""
    runs = [
        Runs(TEST, PLAIN, "one", 20, 0),
        Runs(TEST, BUSY, "one", 7, 0),
        Runs(TEST, PLAIN, "two", 30, 1),
        Runs(TEST, PLAIN, "two", 5, 0),
    ]
    assert green(runs) == {(TEST, PLAIN): 0, (TEST, BUSY): 7}
    assert green([*runs, Runs(TEST, PLAIN, "three", 12, 0)])[TEST, PLAIN] == 12


def test_the_log_moves_into_the_committed_file(tmp_path):
    """Nothing is lost between them, and nothing counted twice."""
    committed, log = tmp_path / "runs.csv", tmp_path / "sweep.log"
    log.write_text("".join(f"plain\tone\t{outcome}\t{TEST}\n" for outcome in ("passed", "passed")))
    before = read(committed, log)
    assert merge(committed, log) == before == [Runs(TEST, PLAIN, "one", 2, 0)]
    assert not log.exists()
    assert read(committed, log) == before
    log.write_text(f"busy core\ttwo\tfailed\t{TEST}\nbusy core\ttwo\tpassed\t{TEST}\n")
    assert merge(committed, log) == [*before, Runs(TEST, BUSY, "two", 1, 1)]
    assert read(committed, log) == [*before, Runs(TEST, BUSY, "two", 1, 1)]


def test_the_table_says_how_many_tests_are_done():
    """Of all tests of a file, also those that never ran; a place has a number of its own."""
    runs = [
        Runs(TEST, PLAIN, "one", 50, 0),
        Runs(TEST + "b", PLAIN, "one", 49, 0),
        Runs(TEST, BUSY, "one", 1, 0),
        Runs("tests/faults/test_x.py::test_of_before", PLAIN, "one", 50, 0),
    ]
    rows = table(runs, [TEST, TEST + "b", TEST + "c", "tests/test_w.py::test_v"], 50, 1).splitlines()
    assert rows[2:] == [
        "| `tests/faults/test_x.py` | 1 of 3 | 1 of 3 | 100 | 0 |",
        "| `tests/test_w.py` | 0 of 1 | 0 of 1 | 0 | 0 |",
    ]


def test_the_page_keeps_what_stands_around_its_table():
    """One command renews the table; a page without its place is refused."""
    page = f"above\n\n{BEGIN}\nold\n{END}\n\nbelow\n"
    assert renew(page, "new") == f"above\n\n{BEGIN}\nnew\n{END}\n\nbelow\n"
    with pytest.raises(ValueError, match="between which the table stands"):
        renew("above\nbelow\n", "new")


PROBE = """
import pytest
@pytest.fixture(scope="module", params=["mmap"])
def strategy(request): return request.param
@pytest.mark.parametrize("x", ["a"])
def test_y(strategy, x): pass
def test_z(): raise AssertionError
@pytest.mark.once
@pytest.mark.parametrize("seed", [0])
def test_once(seed): pass
"""


@pytest.mark.slow
@pytest.mark.time_limit(90)
def test_a_second_run_leaves_out_what_has_passed(pytester):
    """A failed test runs again, a passed one does not; a repetition's number is in no name."""
    log, runs = pytester.path / "sweep.log", pytester.path / "runs.csv"
    pytester.makepyfile(test_probe=PROBE)
    plugins = ("-p", "nbparallel.testing.plugin", "-p", "tests.harness.watchdog")
    plugins += ("-p", "tests.harness.repetitions", "-p", "tests.faults.sweep.sweep_record")
    options = (*plugins, "--repeat", "3", "--sweep-log", str(log), "--sweep-runs", str(runs))
    pytester.runpytest_subprocess(*options, timeout=50).assert_outcomes(passed=4, failed=3)
    assert {(run.test, run.passed, run.failed) for run in read(runs, log)} == {
        ("test_probe.py::test_y[mmap-a]", 3, 0),
        ("test_probe.py::test_z", 0, 3),
        ("test_probe.py::test_once[0]", 1, 0),
    }
    again = pytester.runpytest_subprocess(*options, timeout=50)
    again.assert_outcomes(passed=0, failed=3, deselected=4)
