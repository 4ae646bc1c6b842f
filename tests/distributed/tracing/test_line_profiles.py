"""Profiles of cells on real ranks: which line took the time of which rank."""

from __future__ import annotations

import sys

import pytest

from nbparallel.distributed.tracing.profiling.line_clock import LineClock, LinePlace
from nbparallel.distributed.tracing.profiling.profile import LineTimes, Profile
from nbparallel.errors import ParallelError
from nbparallel.session import Session

pytest_plugins = ["tests.harness.sessions"]
pytestmark = pytest.mark.slow
MEASURES = sys.version_info >= (3, 12)
needs_monitoring = pytest.mark.skipif(not MEASURES, reason="Python 3.11 samples lines inside of loops")
LEFT = """
import signal, sys, threading
tools = [sys.monitoring.get_tool(i) for i in range(6)] if hasattr(sys, "monitoring") else []
tools, signal.getitimer(signal.ITIMER_PROF), [t.name for t in threading.enumerate()], barrier.__module__
"""


def profile_of(session: Session, cell: str, **options: object) -> Profile:
    """Return the profile of a cell."""
    profile = session.run(cell, profile=True, **options).profile  # type: ignore[arg-type]
    assert profile is not None
    return profile


def times(profile: Profile, line: int, file: str = "") -> list[LineTimes]:
    """Return the times of a line by rank; nothing if it took none."""
    return [
        times for found in profile.lines if (found.file, found.line) == (file, line)
        for times in found.ranks.values()
    ]  # fmt: skip


def test_each_line_has_its_time_on_each_rank(two_ranks: Session) -> None:
    """Also what waits for another rank, and what moves data; the slowest rank of a line is known."""
    cell = (
        "import time\ntime.sleep(0.1 + 0.3 * rank)\nbarrier()\ntime.sleep(0.1)\n"
        "x = all_gather(bytes(1 << 24))"
    )
    profile = profile_of(two_ranks, cell)
    sleeps, waits, later, gathers = (times(profile, line) for line in (2, 3, 4, 5))
    assert sleeps[0].computing >= 0.1
    assert sleeps[1].computing >= 0.4
    assert waits[0].waiting >= 0.2 > waits[0].computing + waits[1].waiting
    assert all(0.1 <= each.computing < 0.3 for each in later)
    assert all(each.moving > each.computing for each in gathers)
    line = next(line for line in profile.lines if line.line == 2)
    assert (line.fastest, line.slowest, line.uneven, line.code) == (
        0,
        1,
        True,
        "time.sleep(0.1 + 0.3 * rank)",
    )
    assert profile.ranks[1].seconds == pytest.approx(
        sum(line.ranks[1].seconds for line in profile.lines), abs=0.1
    )


@needs_monitoring
def test_lines_of_loops_and_functions(two_ranks: Session) -> None:
    """Of functions of other cells too; a line that is hot and short does not take its neighbour's time."""
    define = (
        "def work(n):\n    x = 0\n    for i in range(n):\n        x += 1\n        y = sum(range(4000))\n"
        "    return x"
    )
    two_ranks.run(define, execution_count=7)
    cell = (
        "import time\nfor step in range(3):\n    work(3_000)\n    time.sleep(0.05)\n"
        "z = sorted(range(1000), key=lambda i: time.sleep(0.0001) or -i)"
    )
    profile = profile_of(two_ranks, cell)
    work = sum(line.mean.seconds for line in profile.lines if line.file == "In[7]")
    assert sum(each.seconds for each in times(profile, 5, "In[7]")) > 0.8 * 2 * work
    assert times(profile, 3)[0].seconds < 0.1 * work
    assert 0.15 <= times(profile, 4)[0].seconds < 0.15 + 0.1 * work
    assert times(profile, 5)[0].seconds >= 0.1


@needs_monitoring
def test_generators_recursion_and_what_awaits(two_ranks: Session) -> None:
    """A line that resumes a generator, awaits, or catches what a function raises has its time."""
    cell = (
        "import asyncio, time\ndef numbers():\n    for i in range(3):\n"
        "        time.sleep(0.02)\n        yield i\n"
        "for n in numbers():\n    time.sleep(0.04)\nawait asyncio.sleep(0.1)\n"
        "def deep(n):\n    if n == 0:\n        raise KeyError\n    deep(n - 1)\n"
        "try:\n    deep(5)\nexcept KeyError:\n    time.sleep(0.1)\ntime.sleep(0.1)"
    )
    profile = profile_of(two_ranks, cell)
    for line, least in ((4, 0.06), (7, 0.12), (8, 0.1), (16, 0.1), (17, 0.1)):
        assert least <= times(profile, line)[0].computing < least + 0.3, (line, profile)
    assert all(each.seconds < 0.05 for line in (12, 14) for each in times(profile, line))


@pytest.mark.parametrize(("many", "least", "most"), [(1, 0.24, 0.26), (1000, 0.9, 1.0)])
def test_one_long_sample_does_not_outweigh_thousands(many: int, least: float, most: float) -> None:
    """What is dark is divided as samples are; one that waits for the processor is none, many of them are."""
    short, long, anchor = (LinePlace("file.py", line) for line in (1, 2, 3))
    for place, ns, count in ((short, 100, 9_000), (long, 300, 9_000), (short, 8_000_000, many)):
        anchor.hidden[place][ns.bit_length()] = [count * ns, 0, 0, count]
    anchor.dark = [1_000_000_000, 0, 0]
    found = dict(anchor.divided(jump_ns=0))
    assert least < found[short][0] / 1e9 < most
    assert sum(ns for ns, *_ in found.values()) == pytest.approx(1e9)


def test_jumps_within_a_line_are_none_of_its_time() -> None:
    """Two lines take the same time; in samples, one is longer by what its ten jumps cost."""
    plain, jumping, anchor = (LinePlace("file.py", line) for line in (1, 2, 3))
    jumping.visits, jumping.jumps, anchor.dark = 4, 40, [1_000_000, 0, 0]
    for place, ns in ((plain, 500), (jumping, 600)):
        anchor.hidden[place][ns.bit_length()] = [100 * ns, 0, 0, 100]
    found = dict(anchor.divided(jump_ns=10))
    assert (found[plain], found[jumping]) == ([500_000, 0, 0],) * 2


@needs_monitoring
def test_jumps_within_a_line_are_counted(two_ranks: Session) -> None:
    """Those of a comprehension of 100 in a loop, and none of the loop's own."""
    keep = (
        "from nbparallel.distributed.tracing.profiling.line_clock import LinePlace\n"
        "plain = LinePlace.divided\ndef divided(place, jump_ns):\n"
        "    counted.append((place.line, place.visits, place.jumps))\n    return plain(place, jump_ns)\n"
        "LinePlace.divided = divided"
    )
    cell = "counted = []\nfor i in range(400_000):\n    word = [None for _ in text]\n    number = i + 1"
    two_ranks.run(f"text = 'x' * 100\n{keep}", ranks=[0])
    two_ranks.run(cell, ranks=[0], profile=True)
    (counted,) = two_ranks.run("LinePlace.divided = plain; counted", ranks=[0]).values
    (visits, jumps) = next((visits, jumps) for line, visits, jumps in counted if line == 3)
    assert 50 < jumps / visits <= 100 * (visits + 1) / visits  # an opening may begin, or end, within it
    assert all(jumps < visits for line, visits, jumps in counted if line == 4)


@needs_monitoring
def test_what_events_cost_follows_the_machine() -> None:
    """It becomes half as quick (here: its clock twice as fast): that is no time of short lines."""
    clock = (
        "SHARE_BITS = 3  # many events\nfrom time import perf_counter_ns as ns\n"
        "begin = first = pace = 1\ndef clock():\n    return begin + pace * (ns() - first)"
    )
    loop = "for i in range(300_000):\n    a = i\n    b = sum(numbers)"
    with Session(1) as session:
        session.run(
            f"import {LineClock.__module__} as lines\nexec({clock!r}, vars(lines))\nnumbers = range(60)"
        )
        profile = profile_of(
            session, f"{loop}\nlines.begin, lines.first, lines.pace = lines.clock(), lines.ns(), 2\n{loop}"
        )
    head, short, long = (sum(each.seconds for each in times(profile, line)) for line in (5, 6, 7))
    assert head + short < 0.45 * long, profile


@needs_monitoring
def test_a_function_has_its_lines_in_each_profile(two_ranks: Session) -> None:
    """Also where it has not run since the last one, which had disabled its events."""
    two_ranks.run("def work():\n    for i in range(3_000):\n        y = sum(range(4000))", execution_count=8)
    for _ in range(2):
        assert "of the time is line 3 of In[8]" in profile_of(two_ranks, "work()").title


@needs_monitoring
def test_a_short_loop_behind_another_has_its_lines(two_ranks: Session) -> None:
    """Of twelve milliseconds, when events have had their share: its two lines take about as long."""
    loops = "for i in range(5_000):\n    a = sum(range(60))\n    b = max(range(60))\n"
    even = 0
    for _ in range(3):
        profile = profile_of(two_ranks, loops * 4)
        for line in (5, 8, 11):
            parts = [times(profile, number)[0].seconds for number in (line, line + 1)]
            even += min(parts) > 0.1 * sum(parts)
    assert even >= 6, profile  # of nine: a look of another thread may come in between


@needs_monitoring
def test_threads_of_a_rank_are_not_slowed(two_ranks: Session) -> None:
    """Their loops run about as fast as without a profile; the line that waits for them has the time."""
    cell = (
        "import threading, time\ntook = []\ndef spin():\n    began = time.thread_time()\n    n = 0\n"
        "    while n < 500_000:\n        n += 1\n    took.append(time.thread_time() - began)\n"
        "thread = threading.Thread(target=spin)\nthread.start()\nthread.join()\nmin(took)"
    )
    plain = two_ranks.run(cell).values
    result = two_ranks.run(cell, profile=True)
    assert max(result.values) < 8 * max(plain)  # it was thirty times
    assert result.profile is not None
    begins, waits = (times(result.profile, line) for line in (10, 11))  # it may run before `start` returns
    assert min(a.seconds + b.seconds for a, b in zip(begins, waits, strict=True)) > 0.5 * min(plain)


@pytest.mark.parametrize("end", ["1 / 0", "raise KeyboardInterrupt"])
def test_what_ran_of_a_cell_that_failed(two_ranks: Session, end: str) -> None:
    """Its profile is with the error; nothing of it is left on the ranks."""
    before = two_ranks.run(LEFT).values
    with pytest.raises((ParallelError, KeyboardInterrupt)) as caught:
        two_ranks.run(f"import time\ntime.sleep(0.2)\n{end}", profile=True)
    assert times(caught.value.result.profile, 2)[0].computing >= 0.2  # type: ignore[union-attr]
    assert two_ranks.run(LEFT).values == before


@needs_monitoring
def test_tools_that_hold_the_monitoring(two_ranks: Session) -> None:
    """The cell runs, and the profile says which they are; one of them alone is no matter."""
    hold = "import sys\nfor tool in (2, 3, 4):\n    sys.monitoring.use_tool_id(tool, f'tracer {tool}')"
    free = "for tool in (2, 3, 4):\n    sys.monitoring.free_tool_id(tool)"
    two_ranks.run(hold)
    try:
        profile = profile_of(two_ranks, "x = 1")
    finally:
        two_ranks.run(free)
    assert profile.remarks[0].startswith("ranks 0-1: other tools use sys.monitoring already: tracer 4")
    cell = "import cProfile, time\nwith cProfile.Profile():\n    time.sleep(0.1)"
    assert times(profile_of(two_ranks, cell), 3)[0].computing >= 0.1


@needs_monitoring
@pytest.mark.parametrize("then", ["", "; sys.monitoring.use_tool_id(4, 'mine')"])
def test_a_cell_that_frees_the_tool(two_ranks: Session, then: str) -> None:
    """It runs to its end, and its profile says so; later cells, profiled or not, are as ever."""
    before = two_ranks.run(LEFT).values
    cell = (
        f"import sys, time\nsys.monitoring.free_tool_id(4){then}\ndef late(n):\n    return n + 1\n"
        "for i in range(100_000):\n    x = late(i)\ntime.sleep(0.05)\nx"
    )
    result = two_ranks.run(cell, profile=True)
    assert result.values == [100_000] * 2
    assert result.profile is not None
    assert result.profile.remarks[0].startswith("ranks 0-1: the cell has freed tool 4 of sys.monitoring")
    if then:
        assert (
            two_ranks.run(
                "import sys; tool = sys.monitoring.get_tool(4); sys.monitoring.free_tool_id(4); tool"
            ).values
            == ["mine"] * 2
        )
    assert two_ranks.run(LEFT).values == before
    profile = profile_of(two_ranks, "import time\ndef nap():\n    time.sleep(0.1)\nnap()")
    assert (profile.remarks, times(profile, 3)[0].computing >= 0.1) == ((), True)


def test_a_handler_of_the_users_stays(two_ranks: Session) -> None:
    """Whether it was set before the cell or in it; the profile says if it could not see lines."""
    handle = "import signal\ndef handler(*_): pass\nsignal.signal(signal.SIGPROF, handler)"
    look = "signal.getsignal(signal.SIGPROF) is handler, signal.getitimer(signal.ITIMER_PROF)"
    profile_of(two_ranks, handle)
    assert two_ranks.run(look).values == [(True, (0.0, 0.0))] * 2
    profile = profile_of(two_ranks, "x = 1")
    assert MEASURES or "SIGPROF has a handler already" in profile.remarks[0]
    assert two_ranks.run(look).values == [(True, (0.0, 0.0))] * 2
    two_ranks.run("signal.signal(signal.SIGPROF, signal.SIG_DFL)")


def test_without_the_option_nothing_is_there() -> None:
    """No rank loads the profiler, and a cell has no profile."""
    with Session(1) as session:
        result = session.run("import sys\n[name for name in sys.modules if 'profiling' in name]")
        assert (result.values[0], result.profile) == ([], None)
