"""State exploration: every interleaving of small programs over shared words, in three orders of memory.

A program is a generator that yields its accesses to shared words, one by one (`load`, `store`, …), and is
sent what a load has seen; so it reads like the code that it is a model of.  Its own state is where it stands
and its local variables, which must be hashable; loops run over ranges.

``sc``
    Every store is seen by everybody at once.
``tso``
    x86: stores wait in a buffer, in their order, while later loads of the same process go on.
``weak``
    Stores to different words become visible in any order; a load may see what a word held at any time since
    the last fence; and a `read` may take place as late as the next fence.  A branch on a load holds back the
    stores behind it, as on ARM and POWER.

A fence waits until all stores are visible and all reads are done.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import pytest

ORDERS = ("sc", "tso", pytest.param("weak", marks=pytest.mark.slow))
Program = Generator[tuple[Any, ...], Any, None]


class Failed(BaseException):
    """An error or an interrupt at any point."""


class WrongError(AssertionError):
    """The protocol allows what must not be."""


def load(word: str) -> tuple[Any, ...]:
    """Look at a word."""
    return ("load", word)


def store(word: str, value: int) -> tuple[Any, ...]:
    """Write a word."""
    return ("store", word, value)


def fence() -> tuple[Any, ...]:
    """Order everything before it against everything after it."""
    return ("fence",)


def read(word: str, expected: int) -> tuple[Any, ...]:
    """Take content that must be `expected`, whenever it is really read."""
    return ("read", word, expected)


def until(*conditions: tuple[str, int]) -> tuple[Any, ...]:
    """Wait until one of some words is at least so large; sent the place of one that is."""
    return ("until", *conditions)


def sleep(word: str, value: int) -> tuple[Any, ...]:
    """Sleep in a futex while a word holds a value: the system compares what is really in memory."""
    return ("sleep", word, value)


def choose(count: int) -> tuple[Any, ...]:
    """Go on in any of so many ways; sent which."""
    return ("choose", count)


class Model(Protocol):
    """What a model of a protocol says about itself."""

    @property
    def weak(self) -> bool:
        """Whether the code takes the machine's order of memory for a weak one."""

    @property
    def wrong(self) -> str:
        """What is done wrong on purpose; empty: nothing."""


def announce(model: Model, word: str, value: int, name: str = "") -> Program:
    """Write a word that others wait for: `Waiter.announce`; sleepers have a model of their own."""
    if model.weak and model.wrong != f"no fence before {name or word}":
        yield fence()
    yield store(word, value)
    yield fence()


@dataclass(slots=True)
class Automaton:
    """A program as a graph of its local states, found while it is explored."""

    program: Callable[[], Program]
    requests: list[tuple[Any, ...]] = field(default_factory=list)
    """What each state wants next; empty: it has ended."""
    _histories: list[tuple[Any, ...]] = field(default_factory=list)
    _known: dict[Any, int] = field(default_factory=dict)
    _next: dict[tuple[int, Any], int] = field(default_factory=dict)

    def start(self) -> int:
        """Return the first state."""
        return self._state(())

    def after(self, state: int, answer: Any) -> int:
        """Return the state that follows when the program is sent `answer`; `Failed` is thrown into it."""
        found = self._next.get((state, answer))
        if found is None:
            found = self._next[state, answer] = self._state((*self._histories[state], answer))
        return found

    def _state(self, history: tuple[Any, ...]) -> int:
        program = self.program()
        try:
            request = next(program)
            for answer in history:
                request = program.throw(Failed) if answer is Failed else program.send(answer)
            key: Any = tuple(_frames(program))
        except (StopIteration, Failed):
            request, key = (), None
        if key not in self._known:
            self._known[key] = len(self.requests)
            self.requests.append(request)
            self._histories.append(history)
        return self._known[key]


def _frames(program: Any) -> Iterator[Any]:
    while program is not None:
        frame = program.gi_frame
        yield frame.f_lasti, frame.f_code, tuple(frame.f_locals.items())
        program = program.gi_yieldfrom


class State(NamedTuple):
    """Everything there is."""

    programs: tuple[int, ...]
    memory: tuple[int, ...]
    buffers: tuple[tuple[tuple[int, int], ...], ...]
    """Stores of each process that nobody else sees yet."""
    old: tuple[tuple[tuple[int, int], ...], ...]
    """Which older values of which words each process may still see."""
    reads: tuple[tuple[tuple[int, int], ...], ...]
    """Words that each process may still be reading, and what they must hold."""
    fault: str
    """What has happened: nothing, or who was killed."""


def _set(values: tuple[Any, ...], i: int, value: Any) -> tuple[Any, ...]:
    return (*values[:i], value, *values[i + 1 :])


@dataclass(slots=True)
class Exploration:
    """Programs over shared words.

    Parameters
    ----------
    words : mapping
        What each word holds at the beginning.
    raised, killed : sequence of int
        Which processes may be interrupted, or killed, at any point; one of all, once.
    death : str
        The word that somebody sets some time after a process ``p`` was killed: ``f"{death}{p}"``.
    """

    programs: Sequence[Callable[[], Program]]
    words: Mapping[str, int]
    order: str = "sc"
    raised: Sequence[int] = ()
    killed: Sequence[int] = ()
    death: str = "death"
    states: int = 0
    _automata: list[Automaton] = field(init=False)
    _index: dict[str, int] = field(init=False)

    def __post_init__(self) -> None:
        self._automata = [Automaton(program) for program in self.programs]
        self._index = {word: i for i, word in enumerate(self.words)}

    def run(self) -> int:
        """Visit every state that can be reached; returns how many there are.

        Raises
        ------
        WrongError
            Something that must not be read is read, or a process waits for ever.
        """
        n = len(self._automata)
        none: tuple[Any, ...] = ((),) * n
        start = State(
            tuple(a.start() for a in self._automata), tuple(self.words.values()), none, none, none, ""
        )
        seen, stack = {start}, [start]
        while stack:
            state = stack.pop()
            following = list(self._following(state))
            if not following:
                self._check_ended(state)
            for s in following:
                if s not in seen:
                    seen.add(s)
                    stack.append(s)
        self.states = len(seen)
        return self.states

    def _check_ended(self, state: State) -> None:
        for p, local in enumerate(state.programs):
            request = self._automata[p].requests[local]
            if request and state.fault not in (f"killed {p}", f"buried {p}"):
                raise WrongError(f"process {p} waits for ever: {request} in {self._show(state)}")

    def _show(self, state: State) -> dict[str, int]:
        return dict(zip(self.words, state.memory, strict=True))

    def _following(self, state: State) -> Iterator[State]:
        for p, local in enumerate(state.programs):
            for i, (word, value) in enumerate(state.buffers[p]):
                # Stores leave in their order; where order is weak, only those to the same word.
                if i == 0 or (
                    self.order == "weak" and all(word != earlier for earlier, _ in state.buffers[p][:i])
                ):
                    rest = (*state.buffers[p][:i], *state.buffers[p][i + 1 :])
                    yield self._commit(state._replace(buffers=_set(state.buffers, p, rest)), p, word, value)
            if state.fault in (f"killed {p}", f"buried {p}"):
                if state.fault[0] == "k" and not state.buffers[p]:
                    dead = self._index[f"{self.death}{p}"]
                    yield self._commit(state._replace(fault=f"buried {p}"), p, dead, 1)
                continue
            request = self._automata[p].requests[local]
            if not request:
                continue
            yield from getattr(self, "_" + request[0])(state, p, *request[1:])
            if not state.fault:
                failed = state._replace(reads=_set(state.reads, p, ()))  # what it still reads is not used
                if p in self.raised:
                    yield self._go(failed._replace(fault=f"raised {p}"), p, Failed)
                if p in self.killed:
                    yield failed._replace(fault=f"killed {p}")

    def _go(self, state: State, p: int, answer: Any) -> State:
        following = self._automata[p].after(state.programs[p], answer)
        return state._replace(programs=_set(state.programs, p, following))

    def _commit(self, state: State, p: int, word: int, value: int) -> State:
        """Make a store visible."""
        before, old = state.memory[word], state.old
        for q, reads in enumerate(state.reads):
            for reading, expected in reads:
                if reading == word and expected != value and q != p:
                    raise WrongError(f"{list(self.words)[word]} is overwritten while process {q} reads it")
        if self.order == "weak" and before != value:
            for q in range(len(old)):
                if q != p and (word, before) not in old[q]:
                    old = _set(old, q, (*old[q], (word, before)))
        return state._replace(memory=_set(state.memory, word, value), old=old)

    def _seen(self, state: State, p: int, word: int) -> Iterator[tuple[int, State]]:
        """Yield what a process may see in a word, and the state when it has."""
        for w, value in reversed(state.buffers[p]):
            if w == word:
                yield value, state
                return
        newest = tuple(entry for entry in state.old[p] if entry[0] != word)
        yield state.memory[word], state._replace(old=_set(state.old, p, newest))
        older = [entry for entry in state.old[p] if entry[0] == word]
        for i, (_, value) in enumerate(older):
            yield value, state._replace(old=_set(state.old, p, (*newest, *older[i:])))

    # -- accesses ----------------------------------------------------------------------------------------

    def _load(self, state: State, p: int, name: str) -> Iterator[State]:
        for value, after in self._seen(state, p, self._index[name]):
            yield self._go(after, p, value)

    def _store(self, state: State, p: int, name: str, value: int) -> Iterator[State]:
        word = self._index[name]
        if self.order == "sc":
            yield self._go(self._commit(state, p, word, value), p, None)
        else:
            buffers = _set(state.buffers, p, (*state.buffers[p], (word, value)))
            yield self._go(state._replace(buffers=buffers), p, None)

    def _fence(self, state: State, p: int) -> Iterator[State]:
        if not state.buffers[p]:
            done = state._replace(old=_set(state.old, p, ()), reads=_set(state.reads, p, ()))
            yield self._go(done, p, None)

    def _read(self, state: State, p: int, name: str, expected: int) -> Iterator[State]:
        word = self._index[name]
        for value, _ in self._seen(state, p, word):
            if value != expected:
                raise WrongError(f"process {p} reads {value} in {name}, not {expected}")
        if self.order == "weak":
            state = state._replace(reads=_set(state.reads, p, (*state.reads[p], (word, expected))))
        yield self._go(state, p, None)

    def _until(self, state: State, p: int, *conditions: tuple[str, int]) -> Iterator[State]:
        for i, (name, least) in enumerate(conditions):
            for value, after in self._seen(state, p, self._index[name]):
                if value >= least:
                    yield self._go(after, p, i)

    def _sleep(self, state: State, p: int, name: str, value: int) -> Iterator[State]:
        if state.memory[self._index[name]] != value and not state.buffers[p]:
            yield self._go(state, p, None)

    def _choose(self, state: State, p: int, count: int) -> Iterator[State]:
        for i in range(count):
            yield self._go(state, p, i)
