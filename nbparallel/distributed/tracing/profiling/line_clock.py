"""Line clock: how long each line of the user's code runs, by events of `sys.monitoring` (CPython 3.12 on).

Only code of the user's has events: what a library or the interpreter does is time of the line that calls it::

    PY_START, PY_RESUME    of each code object once: is it the user's?  Then it has these events:
    LINE                   the clock turns to this line
    PY_RETURN, PY_YIELD    the clock turns to the line of the caller, which may be frames above;
    PY_UNWIND              also when an exception leaves it

An event costs one to two microseconds: too much for a short line in a loop.  So events may take a share of
the time.  When they took more, what fires often is disabled (*hot*), and the time is *dark* until the next
event that is seen.  A thread enables all of it again every `PERIOD` seconds, for as long as the share allows.
So the lines behind each seen event (its *anchor*) are sampled, and what was dark behind it is divided among
them as the samples are, but for rare long ones.  All time that is not dark is measured, not sampled.

A jump within a line, as in a comprehension, takes longer while events are enabled, but is no event of LINE.
So one opening in `COUNTING` takes no samples, but counts these jumps; what they cost is none of a sample's.

What an event costs is none of its line's time.  A core that others use too is at times half as quick, but
events and reading the clock slow down alike.  So their ratio is measured once, and the clock's cost again and
again.  CPython 3.12 runs code that has had events up to 5 % slower from then on: it has no superinstructions.
"""

from __future__ import annotations

import dis
import inspect
import sys
import threading
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import lru_cache
from itertools import accumulate
from threading import get_ident
from types import CodeType, FrameType
from typing import Any, ClassVar

from nbparallel.distributed.runtime.observers import ObservedCell
from nbparallel.distributed.tracing.profiling.line_log import OWN, LineTimer, Times, add, clock

SHARE_BITS = 7
"""Events may take a 128th of the time."""
WINDOW_NS = 300_000
"""And so much more, before they are disabled: some hundreds."""
FIRST_NS = 100_000
"""And so much, once, behind a line that is new: of each loop some rounds are seen, however short it is."""
PERIOD = 0.02
COUNTING, MOST_JUMPS = 8, 1000
HOT_NS = 1_000_000
"""What fires again within this time may be disabled."""
STEADY_NS, SETTLED_NS = 10_000_000, 100_000
"""As long is a core about as quick; and as long the thread that enables events may still use it."""
SHORT_NS = 2_000
"""No operation between ranks is shorter."""
RARE, LONG = 0.01, 100  # a sample that is rare, and longer than so many medians, waited for the processor
_TOOLS = (4, 3, 2)
"""Ids in `sys.monitoring`; the last one is what `cProfile` needs."""
_JUMPS = {*dis.hasjrel, *dis.hasjabs} - {dis.opmap["FOR_ITER"]}  # it jumps once, at the loop's end
_ASYNC = inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
_NAME, _LONG_NS = "nbparallel", 10**12
_NOTHING = (
    ("for i in 60 * (0,):\n    j = i\n    k = j", 180),
    ("any(None for _ in 90 * (0,))", 180),
    ("[None for _ in 900 * (0,)]", 900),
)
"""Code with so many events of lines, of generators, and jumps within a line."""


class LinePlace:
    """A line, with its time and what was dark behind it."""

    __slots__ = ("dark", "darkened", "filename", "hidden", "hot", "jumps", "line", "new", "times", "visits")

    def __init__(self, filename: str, line: int) -> None:
        self.filename, self.line, self.hot, self.new = filename, line, False, True
        self.times: Times = [0, 0, 0]
        self.dark: Times = [0, 0, 0]
        self.visits = self.jumps = 0
        """How often it began, and how often it jumped within itself, where that was counted."""
        self.darkened = 0
        """How often its own time was a part of that."""
        self.hidden: dict[LinePlace | None, dict[int, list[int]]] = defaultdict(
            lambda: defaultdict(lambda: [0, 0, 0, 0])
        )
        """Samples of hot lines behind it, by their length in bits: times and number.

        None: from an event here, that was not hot, to the next one.
        """

    def divided(self, jump_ns: int) -> Iterator[tuple[LinePlace, Times]]:
        """Yield what was dark behind it, divided among the lines."""
        whole, *parts = self.dark
        first, count = usual(self.hidden.pop(None, {}))
        seen: dict[LinePlace, Times] = {}
        for place, samples in self.hidden.items():
            if place is not None:
                (computing, *others), many = usual(samples)
                computing -= place.jumps * jump_ns * many // max(place.visits, 1)
                seen[place] = [max(0, ns) for ns in (computing, *others)]
        sums = [sum(times[i] for times in seen.values()) for i in range(3)]
        if not sum(sums):
            yield self, self.dark
            return
        computing = whole - sum(parts)
        own = max(0, min(computing, first[0] * self.darkened // count))
        yield self, [own, 0, 0]
        for place, times in seen.items():
            found = [
                amount * (times[i] if sums[i] else sum(times)) // (sums[i] or sum(sums))
                for i, amount in enumerate((computing - own, *parts))
            ]
            yield place, [sum(found), *found[1:]]


def usual(samples: dict[int, list[int]]) -> tuple[Times, int]:
    """Return computing, waiting and moving of samples, where rare long ones count less, and their number."""
    rows = [samples[bits] for bits in sorted(samples)] or [[0, 0, 0, 1]]
    counts = list(accumulate(row[3] for row in rows))
    half, most = (rows[bisect_left(counts, share * counts[-1])] for share in (0.5, 1 - RARE))
    longest = max(LONG * half[0] // half[3], most[0] // most[3])
    return [
        sum(min(ns - waiting - moving, longest * count) for ns, waiting, moving, count in rows),
        *(sum(row[i] for row in rows) for i in (1, 2)),
    ], counts[-1]


class LineClock(LineTimer):
    """Measures lines by their events."""

    # What each event reads and writes: an instance with more than 30 attributes in its dictionary is slow.
    __slots__ = (
        "_anchor", "_began", "_costs", "_counting", "_current", "_dark", "_dim", "_due", "_first", "_granted",
        "_last", "_places", "_spots", "_thread", "_used",
    )  # fmt: skip
    ratios: ClassVar[list[int]] = [0, 0, 0]
    """What the events, and a jump, of `_NOTHING` cost: in 2**20ths of reading the clock twenty times."""

    def __init__(self, cell: ObservedCell) -> None:
        super().__init__(cell)
        self._monitoring: Any = vars(sys)["monitoring"]
        self._ended = threading.Event()
        self._costs, self._pace = [0, 0, 0], _LONG_NS
        self._begin()

    def _begin(self) -> None:
        self._spots: dict[int, dict[int, list[Any]]] = {id(None): defaultdict(lambda: [0, False, None])}
        """Of each code object, by identity, as comparing is slow: when it fired last, whether hot, where."""
        self._codes: dict[int, CodeType] = {}
        self._places: dict[tuple[str, int], LinePlace] = {}
        self._dimmed: dict[int, CodeType] = {}
        self._within: dict[int, set[tuple[int, int]]] = {}
        self._elsewhere = self._current = self._anchor = self._visited = self._place("", 0)
        self._first, self._dim, self._dark, self._counting, self._due = True, False, False, False, 0
        self._used = self._openings = self._counted = self._jumps = self._granted = 0
        self._began = self._last = clock()

    def start(self) -> None:
        """Begin; RuntimeError if other tools use all of `sys.monitoring`."""
        monitoring, events, names = self._monitoring, self._monitoring.events, []
        for tool in _TOOLS:
            try:
                monitoring.use_tool_id(tool, _NAME)
                break
            except ValueError:
                names.append(f"{monitoring.get_tool(tool)}")
        else:
            raise RuntimeError(f"other tools use sys.monitoring already: {', '.join(names)}")
        self._tool, self._thread = tool, get_ident()
        self._events = events.LINE | events.PY_RETURN | events.PY_YIELD | events.PY_RESUME
        self._callbacks = {
            events.LINE: self._line, events.PY_RETURN: self._return, events.PY_YIELD: self._return,
            events.PY_START: self._started, events.PY_RESUME: self._resumed, events.PY_UNWIND: self._unwound,
            events.JUMP: self._jumped,
        }  # fmt: skip
        for event, callback in self._callbacks.items():
            monitoring.register_callback(tool, event, callback)
        if not any(self.ratios):
            self.ratios[:] = [self._calibrated(*each) for each in _NOTHING]
        self._begin()
        self._opener = threading.Thread(target=self._open, name="nbparallel profile", daemon=True)
        self._opener.start()
        monitoring.restart_events()  # a function that was called in an earlier profile would have no events
        monitoring.set_events(tool, events.PY_START | events.PY_RESUME | events.PY_UNWIND)

    def stop(self) -> None:
        """End, and release what it takes of `sys.monitoring`, also where the cell's code has freed it."""
        monitoring, tool = self._monitoring, self._tool
        if monitoring.get_tool(tool) != _NAME:
            self.remark = f"the cell has freed tool {tool} of sys.monitoring: what ran later may be missing"
        if monitoring.get_tool(tool) is None:
            monitoring.use_tool_id(tool, _NAME)  # its events and callbacks are still there
        self._turn(clock(), None, 0, self._elsewhere)
        self._ended.set()
        self._opener.join()
        for code in self._codes.values():
            self._have(code, 0)
        for event, callback in self._callbacks.items():
            found = monitoring.register_callback(tool, event, None)
            monitoring.register_callback(tool, event, None if found == callback else found)
        if monitoring.get_tool(tool) == _NAME:
            monitoring.set_events(tool, 0)
            monitoring.free_tool_id(tool)
        self._codes.clear()

    def lines(self) -> Iterator[tuple[str, int, Times]]:
        """Yield file, line and times of each line; what no line of the user's took is line 0 of no file."""
        for place in self._places.values():
            samples = [(other, times) for other, found in place.hidden.items() for times in found.values()]
            for each, times in (*samples, *place.divided(self._costs[2])):
                add((each or place).times, times)
        for place in self._places.values():
            yield place.filename, place.line, [max(0, ns) for ns in place.times]

    def _calibrated(self, text: str, count: int) -> int:
        """Return how much longer events, or jumps, make code take, besides the callbacks: see `ratios`."""
        code, found = compile(text, OWN, "exec"), []
        codes = [code, *(part for part in code.co_consts if isinstance(part, CodeType))]
        alone = _least(5, exec, code, {})
        for _ in range(12):
            self._begin()
            self._used = -_LONG_NS  # no event is too much
            for each in codes:
                self._adopt(each)
            longer = _least(1, exec, code, {}) - (self._used + _LONG_NS) - alone
            found.append((longer << 20) // (count * self._pace))
        return max(0, sorted(found)[3])  # other processes may have disturbed several

    def _open(self) -> None:
        """Enable what was disabled, again and again."""
        while not self._ended.wait(PERIOD):
            if self._dim:
                begin = clock()
                self._look(begin)
                if self._used <= (begin - self._began) >> SHARE_BITS:
                    self._openings, self._counted, self._jumps = self._openings + 1, 0, 0
                    self._visited = self._elsewhere
                    self._counting = self._openings % COUNTING == 2 and any(self._within.values())
                    self._enable()
                    self._used += clock() - begin

    def _enable(self) -> None:
        self._dim, self._due, codes, self._dimmed = False, clock() + SETTLED_NS, self._dimmed, {}
        for code in codes.values():
            self._have(code, 0)
            self._have(code, self._events | (self._counting and self._monitoring.events.JUMP))

    def _look(self, now: int) -> None:
        """Have what was dark until now be time of the line that runs, unless that is a hot one.

        The thread that is measured has released the interpreter: in C code, or between two instructions.
        """
        frame = sys._current_frames().get(self._thread)
        if frame is None or frame.f_code.co_filename == __file__ or not (frame := self._running(frame)):
            return
        code, place = frame.f_code, self._place(frame.f_code.co_filename, frame.f_lineno)
        begins = code.co_flags & inspect.CO_NEWLOCALS and place.line == code.co_firstlineno
        if not place.hot and not begins:  # a call's first instruction belongs to the `def`
            add(place.times, self._since(now))
            self._current, self._anchor, self._first = place, place, True

    # -- events ----------------------------------------------------------------------------------------

    def _adopt(self, code: CodeType) -> bool:
        """Have events of code that is the user's; whether it is."""
        if id(code) not in self._codes:
            if not self._is_users(code.co_filename):
                return False
            self._codes[id(code)], self._spots[id(code)] = code, defaultdict(lambda: [0, False, None])
            self._have(code, self._events)
        return True

    def _have(self, code: CodeType, events: int) -> None:
        """Have these events of code, while the tool is ours: the user's code may free it."""
        if self._monitoring.get_tool(self._tool) == _NAME:
            self._monitoring.set_local_events(self._tool, code, events)

    def _started(self, code: CodeType, _offset: int) -> Any:
        self._adopt(code)
        return self._monitoring.DISABLE

    def _line(self, code: CodeType, line: int) -> Any:
        return self._turn(clock(), code, line)

    def _jumped(self, code: CodeType, offset: int, target: int) -> Any:
        self._counting &= self._counted < MOST_JUMPS
        if not self._counting or (offset, target) not in self._within[id(code)]:
            return self._monitoring.DISABLE
        self._counted, self._jumps = self._counted + 1, self._jumps + 1
        self._used += self._costs[0]
        return None

    def _return(self, code: CodeType, offset: int, _value: object) -> Any:
        return self._turn(
            clock(), code, ~offset,
            self._place_of(sys._getframe(1).f_back)
            or (self._current if code.co_flags & _ASYNC else self._elsewhere),  # what awaits: its line
        )  # fmt: skip

    def _resumed(self, code: CodeType, offset: int) -> Any:
        now = clock()
        if not self._adopt(code):
            return self._monitoring.DISABLE
        return self._turn(now, code, ~offset, self._place_of(sys._getframe(1)) or self._elsewhere)

    def _unwound(self, code: CodeType, offset: int, _error: BaseException) -> None:
        if id(code) in self._codes:  # this event cannot be disabled
            self._turn(clock(), code, ~offset, self._place_of(sys._getframe(1).f_back) or self._elsewhere)

    def _place_of(self, frame: FrameType | None) -> LinePlace | None:
        """Return the innermost line of the user's."""
        frame = self._running(frame)
        return frame and self._place(frame.f_code.co_filename, frame.f_lineno)

    def _place(self, filename: str, line: int) -> LinePlace:
        key = filename, line
        return self._places.get(key) or self._places.setdefault(key, LinePlace(*key))

    def _turn(self, now: int, code: Any, key: int, place: LinePlace | None = None) -> Any:
        """End the time of the last event, and begin that of a place, or of line `key` of a code object."""
        spots = self._spots.get(id(code))
        if spots is None:
            return None
        spot = spots[key]
        place = spot[2] = place or spot[2] or self._place(code.co_filename, key)
        measured, cost = get_ident() == self._thread, self._costs[key < 0]
        if measured:
            anchor = self._anchor
            elapsed = now - self._last - (cost >> 1)  # below 0 at times: sums must be right
            times = (elapsed, *self._since(now)[1:]) if elapsed > SHORT_NS else (elapsed, 0, 0)
            if self._dark:
                add(anchor.dark, times)
                anchor.darkened += self._first
            else:
                samples = anchor.hidden[None if self._first else self._current]
                add(sample := samples[elapsed.bit_length() * (elapsed > 0)], times)
                sample[3] += 1
        action = None
        too_much = self._used > self._granted and self._used > WINDOW_NS + ((now - self._began) >> SHARE_BITS)
        hot = place.hot = spot[1] or now - spot[0] < HOT_NS
        if too_much and hot and self._anchor.new:
            self._anchor.new = self._counting = False
            self._granted = self._used + FIRST_NS
            self._enable()
        elif too_much and hot and code is not None:
            spot[1] = self._dim = self._dark = True
            action = self._monitoring.DISABLE
            if id(code) not in self._dimmed:
                self._within[id(code)] = jumps = _jumps_within_lines(code)
                self._dimmed[id(code)] = code
                if jumps:
                    self._have(code, self._events & ~self._monitoring.events.LINE)
        spot[0] = now
        if measured:
            if now > self._due:
                last, self._due = self._pace, now + STEADY_NS
                self._pace = _least(12, lambda: [clock() for _ in range(20)])
                # the less of the last two: another process may have had the core just then
                self._costs = [min(last, self._pace) * ratio >> 20 for ratio in self.ratios]
            if not hot:
                self._anchor = place
            if self._counting:  # a visit that has been counted to its end
                self._visited.visits += 1
                self._visited.jumps += self._jumps
                self._visited, self._jumps = place, 0
            self._current, self._first, self._dark = place, not hot, self._dim or (hot and self._counting)
        end = clock()
        if measured:
            self._last = end + (cost >> 1)
        # Also where another thread runs the code; what takes longer has waited for the processor.
        self._used += (end - now if end - now < WINDOW_NS else WINDOW_NS) + cost
        return action


def _least(many: int, call: Callable[..., object], *args: Any) -> int:
    """Return how long a call takes, at least."""
    return min(end - begin for begin, _, end in [(clock(), call(*args), clock()) for _ in range(many)])


@lru_cache(maxsize=64)
def _jumps_within_lines(code: CodeType) -> set[tuple[int, int]]:
    """Return from where to where code jumps within a line: it ends at no event that can be disabled.

    A call for each such jump would make a comprehension half as slow again.
    """
    steps: Any = list(dis.get_instructions(code))
    lines = {step.offset: step.positions.lineno for step in steps}
    return {
        (step.offset, step.argval)
        for step in steps
        if step.opcode in _JUMPS and lines[step.offset] == lines.get(step.argval)
    }
