"""Line clock: how long each line of the user's code runs, by events of `sys.monitoring` (CPython 3.12 on).

Only code of the user's has events: what a library or the interpreter does is time of the line that calls it::

    PY_START, PY_RESUME    of each code object once: is it the user's?  Then it has these events:
    LINE                   the clock turns to this line
    PY_RETURN, PY_YIELD    the clock turns to the line of the caller, which may be frames above;
    PY_UNWIND              also when an exception leaves it

An event costs a third of a microsecond: too much for a short line in a loop.  So events may take `SHARE` of
the time.  When they took more, what fires often is disabled (*hot*), and the time is *dark* until the next
event that is seen.  A thread enables all of it again every `PERIOD` seconds, for as long as the share allows.
So the lines behind each seen event (its *anchor*) are sampled, and what was dark behind it is divided among
them as the samples are.  All time that is not dark is measured, not sampled.
"""

from __future__ import annotations

import dis
import inspect
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import CodeType, FrameType
from typing import Any

SHARE_BITS = 5
"""Events may take a 32nd of the time."""
WINDOW_NS = 300_000
"""And so much more, before they are disabled: about a thousand."""
PERIOD = 0.01
HOT_NS = 1_000_000
"""What fires again within this time may be disabled."""
SHORT_NS = 2_000
"""No operation between ranks is shorter."""
_TOOLS = (4, 3, 2)
"""Ids in `sys.monitoring`; the last one is what `cProfile` needs."""
_JUMPS = {*dis.hasjrel, *dis.hasjabs} - {dis.opmap["FOR_ITER"]}  # it jumps once, at the loop's end
_ASYNC = inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
_clock = time.perf_counter_ns
_cost_ns = 0
"""What an event takes outside of its callback; measured once in a process."""

Times = list[int]
"""Nanoseconds in all, and of them those waiting and those moving data."""


class LinePlace:
    """A line, with its time and what was dark behind it."""

    __slots__ = ("dark", "dark_count", "filename", "hidden", "hot", "line", "own_count", "own_ns", "times")

    def __init__(self, filename: str, line: int) -> None:
        self.filename, self.line, self.hot = filename, line, False
        self.times: Times = [0, 0, 0]
        self.own_ns = self.own_count = 0
        """Of what was measured from an event here, that was not hot, to the next one."""
        self.dark: Times = [0, 0, 0]
        self.dark_count = 0
        """How often its own time was a part of that."""
        self.hidden: dict[LinePlace, Times] = {}
        """Samples of hot lines behind it."""

    def divided(self) -> Iterator[tuple[LinePlace, Times]]:
        """Yield what was dark behind it, divided among the lines."""
        whole, *parts = self.dark
        seen = [(place, [times[0] - times[1] - times[2], *times[1:]]) for place, times in self.hidden.items()]
        sums = [sum(times[i] for _, times in seen) for i in range(3)]
        if not sum(sums):
            yield self, self.dark
            return
        computing = whole - sum(parts)
        own = self.own_ns * self.dark_count // self.own_count if self.own_count else 0
        own = max(0, min(own, computing))
        yield self, [own, 0, 0]
        for place, times in seen:
            found = [
                amount * (times[i] if sums[i] else sum(times)) // (sums[i] or sum(sums))
                for i, amount in enumerate((computing - own, *parts))
            ]
            yield place, [sum(found), *found[1:]]


class LineClock:
    """Measures the lines of one thread, the one that calls `start`.

    Parameters
    ----------
    label_of : callable
        Returns what a file is called, None if it is none of the user's.
    spent : callable
        Returns how long this rank has waited and moved data in operations so far, in nanoseconds.
    """

    remark = ""

    def __init__(self, label_of: Callable[[str], str | None], spent: Callable[[], tuple[int, int]]) -> None:
        self._label_of, self._spent = label_of, spent
        self._monitoring: Any = vars(sys)["monitoring"]
        events = self._monitoring.events
        self._events = events.LINE | events.PY_RETURN | events.PY_YIELD | events.PY_RESUME
        self._callbacks = {
            events.LINE: self._line, events.PY_RETURN: self._return, events.PY_YIELD: self._return,
            events.PY_START: self._begin, events.PY_RESUME: self._resume, events.PY_UNWIND: self._unwind,
        }  # fmt: skip
        self._tool = -1
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._reopen, name="nbparallel profile", daemon=True)
        self._asked = 0
        self._forget()

    def _forget(self) -> None:
        self._known: dict[int, tuple[CodeType, dict[int, list[Any]]]] = {}
        """By identity: comparing code objects is slow.  The spots of each: place, last event, hot."""
        self._places: dict[tuple[str, int], LinePlace] = {}
        self._dimmed: dict[int, CodeType] = {}
        self._silent: dict[int, bool] = {}
        self._elsewhere = self._current = self._anchor = self._place("", 0)
        self._first, self._dim, self._dark = True, False, False
        self._used = 0
        self._waited, self._moved = self._spent()
        self._began = self._last = _clock()

    # -- begin and end ---------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin; RuntimeError if other tools use all of `sys.monitoring`."""
        global _cost_ns
        monitoring, names = self._monitoring, []
        for tool in _TOOLS:
            try:
                monitoring.use_tool_id(tool, "nbparallel")
            except ValueError:
                names.append(monitoring.get_tool(tool))
            else:
                break
        else:
            raise RuntimeError(f"other tools use sys.monitoring already: {', '.join(map(str, names))}")
        self._tool, self._user = tool, threading.get_ident()
        for event, callback in self._callbacks.items():
            monitoring.register_callback(tool, event, callback)
        if not _cost_ns:
            _cost_ns = self._calibrated()
        self._forget()
        self._thread.start()
        events = monitoring.events
        monitoring.set_events(tool, events.PY_START | events.PY_RESUME | events.PY_UNWIND)

    def stop(self) -> None:
        """End, and release what it takes of `sys.monitoring`."""
        monitoring, tool = self._monitoring, self._tool
        monitoring.set_events(tool, 0)
        self._turn(_clock(), None, [None, 0, False], self._elsewhere)
        self._stop.set()
        self._thread.join()
        for code, _ in self._known.values():
            monitoring.set_local_events(tool, code, 0)
        for event in self._callbacks:
            monitoring.register_callback(tool, event, None)
        monitoring.free_tool_id(tool)
        self._known.clear()

    def lines(self) -> Iterator[tuple[str, int, Times]]:
        """Yield file, line and times of each line; what no line of the user's took is line 0 of no file."""
        found = {place: list(place.times) for place in self._places.values()}
        for place in self._places.values():
            for each, times in place.divided():
                found[each] = [a + b for a, b in zip(found[each], times, strict=True)]
        for place, times in found.items():
            if times[0]:
                yield place.filename, place.line, times

    def _calibrated(self) -> int:
        """Return what an event costs outside of its callback: the time of lines that do nothing."""
        code, runs = compile("x = 0\n" * 20, "<nbparallel>", "exec"), 40
        self._began = 0  # no event is too much
        self._adopt(code)
        for _ in range(runs):
            exec(code, {})
        self._monitoring.set_local_events(self._tool, code, 0)
        times = sorted(place.times[0] for place in self._places.values())
        return max(1, times[len(times) // 2] // runs)

    def _reopen(self) -> None:
        """Enable what was disabled, again and again."""
        monitoring = self._monitoring
        while not self._stop.wait(PERIOD):
            begin = _clock()
            if not self._dim:
                continue
            self._look(begin)
            if self._used > (begin - self._began) >> SHARE_BITS:
                continue
            self._dim, codes, self._dimmed = False, self._dimmed, {}
            for code in codes.values():
                monitoring.set_local_events(self._tool, code, 0)
                monitoring.set_local_events(self._tool, code, self._events)
            self._used += _clock() - begin

    def _look(self, now: int) -> None:
        """Have what was dark until now be time of the line that runs, unless that is a hot one.

        The thread that is measured has released the interpreter: in C code, or between two instructions.
        """
        frame = sys._current_frames().get(self._user)
        if frame is None or frame.f_code.co_filename == __file__ or not (place := self._running(frame)):
            return
        code = frame.f_code
        begins = code.co_flags & inspect.CO_NEWLOCALS and place.line == code.co_firstlineno
        if not place.hot and not begins:  # a call's first instruction belongs to the `def`
            self._add(now, place.times)
            self._last, self._current, self._anchor, self._first = now, place, place, True

    # -- events ----------------------------------------------------------------------------------------

    def _adopt(self, code: CodeType) -> bool:
        if id(code) in self._known:
            return True
        if code.co_filename == "<nbparallel>" or self._label_of(code.co_filename) is not None:
            self._known[id(code)] = code, {}
            self._monitoring.set_local_events(self._tool, code, self._events)
            return True
        return False

    def _begin(self, code: CodeType, _offset: int) -> Any:
        self._adopt(code)
        return self._monitoring.DISABLE

    def _line(self, code: CodeType, line: int) -> Any:
        now = _clock()
        known = self._known.get(id(code))
        if known is None or threading.get_ident() != self._user:
            return None
        spot = known[1].get(line)
        if spot is None:
            spot = known[1][line] = [self._place(code.co_filename, line), 0, False]
        return self._turn(now, code, spot, spot[0])

    def _return(self, code: CodeType, offset: int, value: object) -> Any:
        now = _clock()
        known = self._known.get(id(code))
        if known is None or threading.get_ident() != self._user:
            return None
        place = self._running(sys._getframe(1).f_back)
        if place is None:  # a coroutine waits: the line goes on
            place = self._current if code.co_flags & _ASYNC else self._elsewhere
        return self._turn(now, code, known[1].setdefault(~offset, [None, 0, False]), place)

    def _unwind(self, code: CodeType, offset: int, error: BaseException) -> None:
        now = _clock()
        if id(code) in self._known and threading.get_ident() == self._user:
            place = self._running(sys._getframe(1).f_back) or self._elsewhere
            self._turn(now, None, [None, 0, False], place)  # this event cannot be disabled

    def _resume(self, code: CodeType, offset: int) -> Any:
        now = _clock()
        if threading.get_ident() != self._user:
            return None
        if not self._adopt(code):
            return self._monitoring.DISABLE
        place = self._running(sys._getframe(1)) or self._elsewhere
        return self._turn(now, code, self._known[id(code)][1].setdefault(~offset, [None, 0, False]), place)

    def _is_silent(self, code: CodeType) -> bool:
        """Whether code jumps within a line: where that ends is no event, so that it cannot be disabled.

        A call for each such jump would make a comprehension half as slow again.
        """
        found = self._silent.get(id(code))
        if found is None:
            steps: Any = list(dis.get_instructions(code))
            lines = {step.offset: step.positions.lineno for step in steps}
            found = any(lines[s.offset] == lines.get(s.argval) for s in steps if s.opcode in _JUMPS)
            self._silent[id(code)] = found
        return found

    def _running(self, frame: FrameType | None) -> LinePlace | None:
        """Return the innermost line of the user's."""
        while frame is not None:
            if id(frame.f_code) in self._known:
                return self._place(frame.f_code.co_filename, frame.f_lineno)
            frame = frame.f_back
        return None

    def _place(self, filename: str, line: int) -> LinePlace:
        key = filename, line
        place = self._places.get(key)
        if place is None:
            place = self._places[key] = LinePlace(filename, line)
        return place

    def _add(self, now: int, times: Times, more: Times | None = None) -> int:
        """Add the time since the last event."""
        elapsed, waiting, moving = max(0, now - self._last - _cost_ns), 0, 0
        if elapsed > SHORT_NS:
            waited, moved = self._spent()
            waiting, moving = waited - self._waited, moved - self._moved
            self._waited, self._moved = waited, moved
        for each in (times, more):
            if each is not None:
                each[0] += elapsed
                each[1] += waiting
                each[2] += moving
        return elapsed

    def _turn(self, now: int, code: CodeType | None, spot: list[Any], place: LinePlace) -> Any:
        """End the time of the last event, and begin that of a place; return what the callback returns."""
        anchor, current = self._anchor, self._current
        if self._dark:
            self._add(now, anchor.dark)
            anchor.dark_count += self._first
        elif self._first:
            anchor.own_ns += self._add(now, current.times)
            anchor.own_count += 1
        else:
            sample = anchor.hidden.get(current)
            if sample is None:
                sample = anchor.hidden[current] = [0, 0, 0]
            self._add(now, current.times, sample)
        action = None
        too_much = self._used > WINDOW_NS + ((now - self._began) >> SHARE_BITS)
        hot = place.hot = spot[2] or now - spot[1] < HOT_NS
        if too_much and hot and code is not None:
            spot[2] = self._dim = True
            action = self._monitoring.DISABLE
            if id(code) not in self._dimmed:
                self._dimmed[id(code)] = code
                if self._is_silent(code):
                    line = self._monitoring.events.LINE
                    self._monitoring.set_local_events(self._tool, code, self._events & ~line)
        spot[1] = now
        self._current, self._first = place, not hot
        if not hot:
            self._anchor = place
        self._dark = self._dim
        self._last = end = _clock()
        self._used += end - now + _cost_ns
        return action
