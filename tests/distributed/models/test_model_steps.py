"""The models' programs do what the code does: the same accesses to the same words, with the same fences.

The code runs here on words that write down who looks at them, as on a machine with strong order of memory and
as on one with weak order; the program of its model takes the same way.  Several looks at one word in turn
count as one: that is how the code waits.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from nbparallel.distributed.point_to_point import streaming
from nbparallel.distributed.point_to_point.ring import RECORD, RingReader, RingWriter
from nbparallel.distributed.runtime import waiting
from nbparallel.distributed.slots import slot_area, slot_protocol
from nbparallel.distributed.slots.fingerprint import fingerprint
from nbparallel.distributed.slots.lock_table import LockTable, name_word
from nbparallel.wire.control import Operation
from tests.distributed.models import (
    stream_model,
    test_bakery_model,
    test_ring_model,
    test_slots_model,
    test_wake_model,
)
from tests.distributed.models.exploration import Program

Trace = list[tuple[str, str]]
CHUNK = 64
PUT, TAIL, HEAD, TAKEN = 1, 0, 8, 11  # as `tail_word` and `head_word` below say
LAYOUT = SimpleNamespace(
    tail_word=lambda *_: TAIL, head_word=lambda *_: HEAD, ring_byte=lambda *_: 0, ring_capacity=4096
)


class Watched:
    """Memory that writes down every access to what has a name there; the rest is silent."""

    def __init__(self, trace: Trace, memory: Any, name: Callable[[Any], str | None], look: str) -> None:
        self._trace, self._memory, self._name, self._look = trace, memory, name, look

    def __getitem__(self, key: Any) -> Any:
        self._note(self._look, key)
        return self._memory[key]

    def __setitem__(self, key: Any, value: Any) -> None:
        self._note("store", key)
        self._memory[key] = value

    def _note(self, what: str, key: Any) -> None:
        name = self._name(key)
        if name is not None:
            self._trace.append((what, name))


class Ground:
    """What the code needs around it: words, a waiter whose fences are seen, and a chunked window."""

    def __init__(self, monkeypatch: Any, *, weak: bool) -> None:
        self.weak, self.trace = weak, []  # type: bool, Trace
        monkeypatch.setattr(waiting, "STRONG_ORDER", not weak)
        monkeypatch.setattr(streaming, "CHUNK", CHUNK)
        monkeypatch.setattr(streaming, "LEAST_PATIENCE_NS", 0)
        monkeypatch.setattr(streaming, "NBYTES_PER_NS", 1 << 40)
        self.raw = [0] * 64
        self.halves = [0] * 8
        lock = SimpleNamespace(acquire=lambda _: None, release=self._fence)
        monkeypatch.setattr(waiting, "threading", SimpleNamespace(Lock=lambda: lock))
        monkeypatch.setattr(waiting, "find_syscall", lambda: lambda *_: self._fence())
        view: Any = SimpleNamespace(
            halves=self.watched(self.halves, ("bell0", "parked0", "bell1", "parked1")), map=bytearray(64),
            half_bell=lambda rank: 2 * rank, half_parked=lambda rank: 2 * rank + 1, world_size=2,
        )  # fmt: skip
        self.waiter = waiting.Waiter(view, 0, spin=False)
        sleep: Any = lambda *_: self.trace.append(("sleep", "bell1"))  # noqa: E731
        self.waiter.futex_wait = sleep  # type: ignore[method-assign]

    def _fence(self) -> None:
        self.trace.append(("fence", ""))

    def watched(self, memory: Any, names: Mapping[Any, str] | tuple[str, ...], look: str = "load") -> Any:
        """Return memory whose places have these names."""
        names = dict(enumerate(names)) if isinstance(names, tuple) else names
        by_index = names

        def name(key: Any) -> str | None:
            return None if isinstance(key, slice) else by_index.get(key)  # making a view reads nothing

        return Watched(self.trace, memory, name, look)

    def window(self) -> Any:
        """Return a window of chunks, each place of which has its name."""

        def name(key: Any) -> str:
            start = key.start or 0
            chunk = (start - streaming.HEAD_NBYTES) // CHUNK
            return f"chunk{chunk}" if chunk >= 0 else "head"

        memory = np.zeros(streaming.HEAD_NBYTES + streaming.CHUNKS * CHUNK, np.uint8)
        return Watched(self.trace, memory, name, "read")

    def context(self, names: Mapping[int, str]) -> Any:
        """Return what a stream knows of its rank."""
        return SimpleNamespace(
            rank=0,
            waiter=self.waiter,
            words=self.watched(self.raw, names),
            view=SimpleNamespace(layout=LAYOUT),
        )


def short(trace: Trace) -> Trace:
    """Return a trace without who sleeps and the same thing twice."""
    return once([step for step in trace if not step[1].startswith(("bell", "parked"))])


def once(trace: Trace) -> Trace:
    """Return a trace without the same thing twice."""
    return [step for step, _ in itertools.groupby(trace)]


def way(
    program: Program,
    answers: Sequence[int] = (),
    words: Mapping[str, int] | None = None,
) -> Trace:
    """Return a model's accesses until it ends or sleeps; loads see `words` and what it stores itself."""
    trace: Trace = []
    memory: dict[str, int] = dict(words or {})
    answer: Any = None
    chosen = [*answers]
    try:
        while True:
            kind, *rest = program.send(answer)
            answer = memory.get(rest[0], 0) if kind == "load" else None
            if kind == "choose":
                answer = chosen.pop()
                continue
            if kind == "until":
                kind, rest, answer = "load", [rest[0][0]], 0
            if kind == "store":
                memory[rest[0]] = rest[1]
            trace.append((kind, rest[0] if rest else ""))
            if kind == "sleep":
                return trace
    except StopIteration:
        return trace


@pytest.fixture(params=["strong", "weak"])
def ground(request: Any, monkeypatch: Any) -> Ground:
    """Return what the code needs, for either order of memory."""
    return Ground(monkeypatch, weak=request.param == "weak")


STREAM_WORDS = {PUT: "put", PUT + 1: "rest_from", TAKEN: "taken"}


def stream_out(ground: Ground) -> Any:
    """Return a sending end."""
    out = streaming.StreamOut(ground.context(STREAM_WORDS), 1)
    window = ground.window()
    out.memory = lambda: window  # type: ignore[method-assign,assignment]
    out.pack = lambda _: b"where it lies"  # type: ignore[method-assign]
    return out


@pytest.mark.parametrize("count", [1, 3, streaming.CHUNKS])
def test_writing_a_stream(ground: Ground, count: int) -> None:
    """As many chunks as there are places."""
    stream_out(ground).write(np.ones(count * CHUNK, np.uint8), streaming.Call(1, 0, None), lambda _: None)
    model = stream_model.Stream((count,), streaming.CHUNKS, ground.weak)
    assert short(ground.trace) == short(way(stream_model.write(model, 0, 0)))


def test_writing_the_rest_elsewhere(ground: Ground) -> None:
    """To a receiver who takes nothing out; the rest is held before it is announced."""
    out, chunks = stream_out(ground), streaming.CHUNKS + 2

    def copy(data: Any) -> Any:
        ground.trace.append(("store", "content0"))
        return data

    out.copy_rest = copy
    held: list[int] = []
    out.write(
        np.ones(chunks * CHUNK, np.uint8),
        streaming.Call(1, 0, None),
        lambda _: held.append(len(ground.trace)),
    )
    model = stream_model.Stream((chunks,), streaming.CHUNKS, ground.weak)
    looked = ground.trace.index(("store", "content0")) + 1
    assert ground.trace[looked] == ("load", "taken")  # only whether he took anything: no step of the protocol
    found = ground.trace[:looked] + ground.trace[looked + 1 :]
    assert short(found) == short(way(stream_model.write(model, 0, 0), [1]))
    assert held == [ground.trace.index(("store", "head"))]


@pytest.mark.parametrize("rest", [False, True])
def test_reading_a_stream(ground: Ground, rest: bool) -> None:
    """All of whose chunks are there; or all but the last two, which lie elsewhere."""
    into = streaming.StreamIn(ground.context(STREAM_WORDS), 1)
    count = streaming.CHUNKS + 2 if rest else 3
    ground.raw[PUT] = count
    ground.raw[PUT + 1] = count - 2 if rest else 0
    window = ground.window()
    into.attach_window = lambda _: window  # type: ignore[method-assign,assignment]

    def content(_: Any) -> Any:
        ground.trace.extend([("read", "head"), ("read", "content0")])
        return 0

    into.attach_rest = content  # type: ignore[method-assign]
    into.read(
        np.zeros(count * CHUNK, np.uint8), streaming.BODY.pack(0) + b"where", streaming.Call(1, 0, None)
    )
    model = stream_model.Stream((count,), streaming.CHUNKS, ground.weak)
    words = {"put": count, "rest_from": ground.raw[PUT + 1]}
    assert short(ground.trace) == short(way(stream_model.take(model, 0, 0), words=words))


def ring(ground: Ground, end: Any, names: Mapping[int, str], content: bytes = b"") -> Any:
    """Return an end of a ring, whose bytes are one unit."""
    octets = Watched(ground.trace, bytearray(content).ljust(4096), lambda _: "unit0", "read")
    view = SimpleNamespace(layout=LAYOUT, words=ground.watched(ground.raw, names), octets=octets)
    made = end(view, ground.waiter, 0, 1)
    ground.trace.clear()
    return made


def test_messages_in_a_ring(ground: Ground) -> None:
    """A record is put in, and taken out."""
    record = RECORD.pack(RECORD.size, 0, 1, 0, 0, 0)
    out = ring(ground, RingWriter, {TAIL: "tail", HEAD: "head"})
    assert out.has_room(len(record))
    out.put(record)
    model = test_ring_model.Ring((1,), weak=ground.weak)
    assert short(ground.trace) == short(way(test_ring_model.put_all(model)))
    into = ring(ground, RingReader, {TAIL: "tail", HEAD: "head"}, record)
    assert into.has_message()
    into.take()
    assert short(ground.trace) == short(way(test_ring_model.take_all(model)))


def test_acknowledging(ground: Ground) -> None:
    """What was read, then the word that frees it."""
    into = ring(ground, RingReader, {HEAD + 1: "acknowledged"})
    into.acknowledge(1, 1)
    model = stream_model.Stream((1,), weak=ground.weak)
    assert short(ground.trace) == short(way(stream_model.acknowledge(model, 1)))


def test_announcing_and_sleeping(ground: Ground) -> None:
    """With a sleeper, and without; bells and parked words included."""
    words = ground.watched(ground.raw, {TAIL: "word0", HEAD: "word1"})
    for parked in (0, 1):
        for announce in (
            lambda: ground.waiter.announce(words, TAIL, 1),
            lambda: ground.waiter.announce_to(1, words, TAIL, 1),
        ):
            ground.halves[3] = parked
            ground.trace.clear()
            announce()
            model = way(test_wake_model.announce(0, 1, ground.weak, ""), words={"parked1": parked})
            assert once(ground.trace) == model
    ground.trace.clear()
    looks = iter([False, False, True])

    def satisfied() -> bool:
        ground.trace.append(("load", "word1"))
        return next(looks)

    ground.waiter.until(satisfied, 1, check=lambda: None)
    model = way(test_wake_model.wait(0, 1, ""))
    assert once(ground.trace)[: len(model)] == model


def test_meeting(ground: Ground) -> None:
    """A collective of two: the slot, the counters, and what is read of the other's slot."""
    slot = {slot_area.WORD: "slot0.1", 32 + slot_area.WORD: "slot1.1"}
    names = {60: "arrive0", 61: "arrive1", 62: "done0", 63: "done1", **slot}
    area = SimpleNamespace(
        ranks=(0, 1), index=0, others=(1,), words=ground.watched(ground.raw, names), octets=bytearray(8192),
        payload_nbytes=64, arrive=(60, 61), done=(62, 63), slots=[[0] * 4, [256] * 4],
    )  # fmt: skip
    context = SimpleNamespace(rank=0, waiter=ground.waiter, open=0, forked=False)
    group = slot_protocol.SlotProtocol(context, area)  # type: ignore[arg-type]
    called = fingerprint("barrier", "-", "-")
    ground.raw[61], ground.raw[32 + slot_area.WORD] = 1, called.word
    group.begin(Operation.barrier, called, 1)
    assert group.arrive_and_wait()
    group.release()
    model = test_slots_model.World(2, 4, ((0, 1),), ground.weak)
    found = [(("read" if step == ("load", "slot1.1") else step[0]), step[1]) for step in short(ground.trace)]
    expected = [(kind, name.replace(".0", ".1")) for kind, name in way(test_slots_model.rank(model, 0))]
    assert found == short(expected)


def test_a_lock(ground: Ground) -> None:
    """Taken and released, while another rank has an entry of that name."""
    starts = (20, 40)
    context = SimpleNamespace(
        rank=0, waiter=ground.waiter, forked=False, ready=True, operations=0,
        words=ground.watched(ground.raw, {22: "ticket0", 42: "ticket1"}),
        view=SimpleNamespace(world_size=2, word_locks=lambda r: starts[r], word_death=lambda _: 60),
        call_site=SimpleNamespace(line=lambda: 1), cell=SimpleNamespace(go_on=False, ranks=(0, 1)),
        peers=SimpleNamespace(hosts=None),
    )  # fmt: skip
    ground.raw[40], ground.raw[41] = 1, name_word("x")
    table = LockTable(context)  # type: ignore[arg-type]
    assert table.acquire("x", None, 1) == []
    table.release("x")
    model = way(test_bakery_model.take(0, 2, ground.weak)) + way(test_bakery_model.release(0, ground.weak))
    assert short(ground.trace) == short(model)
