"""The protocol of streams as programs for `exploration`: what `streaming`, a sender and a ring do to words.

Chunk p holds ``p + 1`` in its place; what else lies somewhere holds a number of its message.  So whatever is
read too early, too late or from the wrong place is another number.
"""

from __future__ import annotations

from dataclasses import dataclass

from tests.distributed.models.exploration import (
    Exploration,
    Failed,
    Program,
    announce,
    choose,
    fence,
    load,
    read,
    store,
    until,
)

SENDER, RECEIVER = 0, 1
COPY, REST, USED_AGAIN = 100, 200, -1


@dataclass(frozen=True)
class Stream:
    """Messages of one rank to another, and what is done wrong on purpose."""

    messages: tuple[int, ...]
    """How many chunks each has."""
    places: int = 2
    weak: bool = False
    """Whether the code takes the machine's order of memory for a weak one."""
    patient: bool = False
    """Whether the sender has no memory for a rest, so that it waits until there is room."""
    wrong: str = ""

    def place(self, position: int) -> str:
        """Return where a chunk lies."""
        return f"chunk{position % self.places}"

    def words(self) -> dict[str, int]:
        """Return all words at the beginning."""
        names = ["tail", "put", "rest_from", "head", "taken", "acknowledged", "failed0", "failed1"]
        names += ["death0", "death1", *(f"chunk{i}" for i in range(self.places))]
        for m in range(len(self.messages)):
            names += [f"record{m}", f"content{m}"]
        return dict.fromkeys(names, 0)

    def explore(self, order: str, *, raised: tuple[int, ...] = (), killed: tuple[int, ...] = ()) -> int:
        """Visit every state; returns how many there are."""
        programs = [lambda: sender(self), lambda: receiver(self)]
        return Exploration(programs, self.words(), order, raised, killed).run()


def wait(s: Stream, word: str, least: int, other: int) -> Program:
    """Wait for the other side, and raise if it has failed or died."""
    ends = () if s.wrong == "do not look for failures" else ((f"failed{other}", 1), (f"death{other}", 1))
    if (yield until((word, least), *ends)):
        raise Failed


def sender(s: Stream) -> Program:
    """Send all messages, then leave the cell."""
    try:
        yield from send_all(s)
    except Failed:
        yield store("failed0", 1)
        yield fence()


def send_all(s: Stream) -> Program:
    """Send all messages, and let go of the window if nothing in it is still to be read."""
    position = freed = 0
    for m in range(len(s.messages)):
        freed = yield from let_go(s, m, freed)
        count = s.messages[m]
        taken = yield load("taken")
        streamed = position - taken + count <= s.places or position == taken or s.wrong == "always stream"
        del taken
        if not streamed:
            yield store(f"content{m}", COPY + m)
        yield store(f"record{m}", position + 1 if streamed else COPY)
        yield from announce(s, "tail", m + 1)
        if streamed:
            yield from write(s, m, position)
            position += count
    taken = yield load("taken")
    if position == taken or s.wrong == "let go at once":
        for i in range(s.places):
            yield store(f"chunk{i}", USED_AGAIN)


def let_go(s: Stream, m: int, freed: int) -> Program:
    """Use the memory again of which the receiver has said that it needs it no more."""
    acknowledged = m if s.wrong == "no acknowledgement" else (yield load("acknowledged"))
    for i in range(freed, acknowledged):
        yield store(f"content{i}", USED_AGAIN)
    return acknowledged


def write(s: Stream, m: int, begin: int) -> Program:
    """Put in all chunks of a message, or its rest elsewhere."""
    end, room = begin + s.messages[m], s.places + (s.wrong == "one place too early")
    for position in range(begin, end):
        taken = yield load("taken")
        if position - taken >= room:
            if s.patient or not (yield choose(2)):
                yield from wait(s, "taken", position - room + 1, RECEIVER)
            else:
                yield from put_rest(s, m, position, end)
                return
        del taken
        if s.wrong == "announce before writing":
            yield from announce(s, "put", position + 1)
        yield store(s.place(position), position + 1)
        if s.wrong != "announce before writing":
            yield from announce(s, "put", position + 1)


def put_rest(s: Stream, m: int, position: int, end: int) -> Program:
    """Put the rest of a message where there is room."""
    held = s.wrong != "hold afterwards"
    try:
        yield store(f"content{m}", REST + m)
        if s.wrong == "say too late where":
            yield from announce(s, "put", end)
        yield store("head", REST + m)
        yield store("rest_from", position)
        yield from announce(s, "put", end)
        held = True
    except Failed:
        if not held:
            yield store(f"content{m}", USED_AGAIN)
        raise


def receiver(s: Stream) -> Program:
    """Receive all messages into buffers."""
    try:
        for m in range(len(s.messages)):
            yield from wait(s, "tail", m + 1, SENDER)
            if s.weak:
                yield fence()
            record = yield load(f"record{m}")
            if record == COPY:
                yield read(f"content{m}", COPY + m)
            else:
                yield from take(s, m, record - 1)
            yield from acknowledge(s, m + 1)
    except Failed:
        yield store("failed1", 1)
        yield fence()


def acknowledge(s: Stream, number: int) -> Program:
    """Say that a message was taken."""
    if s.weak and s.wrong != "no fence before acknowledged":
        yield fence()
    yield store("acknowledged", number)
    yield fence()


def take(s: Stream, m: int, base: int) -> Program:
    """Take out all chunks of a message, or its rest from elsewhere."""
    for position in range(base, base + s.messages[m]):
        put = yield load("put")
        if put <= position and s.wrong != "do not wait":
            yield from wait(s, "put", position + 1, SENDER)
        del put
        if s.weak and s.wrong != "no fence after put":
            yield fence()
        rest_from = yield load("rest_from")
        if (base < rest_from or s.wrong == "any rest") and 0 < rest_from <= position:
            yield read("head", REST + m)
            yield read(f"content{m}", REST + m)
            break
        del rest_from
        if s.wrong == "free before reading":
            yield from announce(s, "taken", position + 1)
        yield read(s.place(position), position + 1)
        if s.wrong != "free before reading":
            yield from announce(s, "taken", position + 1)
    yield from announce(s, "taken", base + s.messages[m])
