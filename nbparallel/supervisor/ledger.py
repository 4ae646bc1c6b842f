"""Ledger: who holds which segment; decides, but touches nothing.

A pure state machine: no descriptor, no socket, no clock, so that tests can run a hundred thousand histories
a minute.  `SegmentDesk` turns frames into events and actions into frames.

Note [holds]
------------
A client either holds a segment or does not: registering and fetching take the hold, releasing ends it, and
all of a client's holds end with it.  While anybody holds a segment its memory stays.  When nobody does any
more, its living creator gets it back (`Idle`), otherwise it is closed.  What only a *dead* client held goes
back to the system, even if the creator lives (`Drop`): it is not reused.

Note [names]
------------
A client says which name it will make before it makes it (`Intended`).  From then on the name is the
ledger's: it goes when the last hold of its segment goes, when its maker ends and nobody holds it, and with
the session.  Removing a name takes no memory from anybody who has mapped it, so removing too early costs an
outsider the way in, never a user the data.  The record that lies beside a maker's names (`wire.owners`) is
his as long as he lives, and goes after the last of them when he is dead.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from nbparallel.supervisor.names import Names
from nbparallel.wire.segments import LostReason, creator_of

# What happened


@dataclass(frozen=True, slots=True)
class Joined:
    """A client is there."""

    client: int


@dataclass(frozen=True, slots=True)
class Gone:
    """A client's process has ended, or its socket sent damage."""

    client: int


@dataclass(frozen=True, slots=True)
class Registered:
    """A client made a segment, and holds it."""

    client: int
    segment: int
    nbytes: int
    writable: bool
    """Whether others may write."""
    path: str = ""
    """Its name in the file system, or empty."""


@dataclass(frozen=True, slots=True)
class Intended:
    """A client is about to make a name."""

    client: int
    path: str


@dataclass(frozen=True, slots=True)
class Removed:
    """A client has removed a name of its own, or did not make it after all."""

    client: int
    path: str


@dataclass(frozen=True, slots=True)
class Asked:
    """A client wants to hold a segment."""

    client: int
    segment: int
    writable: bool
    """Whether it wants to write."""
    sequence: int
    """The question's number, for the answer."""


@dataclass(frozen=True, slots=True)
class Released:
    """A client ends its hold."""

    client: int
    segment: int


@dataclass(frozen=True, slots=True)
class WriteAllowed:
    """A segment's creator lets others write."""

    client: int
    segment: int


@dataclass(frozen=True, slots=True)
class Forgotten:
    """A segment's creator ends its hold and does not want the memory back."""

    client: int
    segment: int


@dataclass(frozen=True, slots=True)
class Drained:
    """Everything that had been sent before some question about an unknown segment has been read."""


Event: TypeAlias = (
    Joined | Gone | Registered | Intended | Removed | Asked | Released | WriteAllowed | Forgotten | Drained
)

# What to do


@dataclass(frozen=True, slots=True)
class Keep:
    """Keep the descriptor that came with the event."""

    segment: int


@dataclass(frozen=True, slots=True)
class Close:
    """Close the descriptor of a segment."""

    segment: int


@dataclass(frozen=True, slots=True)
class Unlink:
    """Remove a name from the file system; it may never have come to be, or be gone already."""

    path: str


@dataclass(frozen=True, slots=True)
class Unrecord:
    """Remove the owner record of a dead maker's names, none of which is left."""

    record: str


@dataclass(frozen=True, slots=True)
class Grant:
    """Send a descriptor."""

    client: int
    segment: int
    nbytes: int
    writable: bool
    """False: one that is open for reading only."""
    sequence: int
    fresh: bool
    """Whether the client did not hold it before."""


@dataclass(frozen=True, slots=True)
class Refuse:
    """Answer that there is none."""

    client: int
    segment: int
    reason: LostReason
    sequence: int


@dataclass(frozen=True, slots=True)
class Idle:
    """Tell a segment's creator that nobody holds it."""

    client: int
    segment: int


@dataclass(frozen=True, slots=True)
class Drop:
    """Tell a segment's creator to give its memory back to the system."""

    client: int
    segment: int


@dataclass(frozen=True, slots=True)
class Offend:
    """The client did what no client of ours does: end the connection."""

    client: int
    text: str


Action: TypeAlias = Keep | Close | Unlink | Unrecord | Grant | Refuse | Idle | Drop | Offend


@dataclass(slots=True)
class Entry:
    """One segment."""

    nbytes: int
    """Size in bytes."""
    writable: bool
    """Whether others than its creator may write."""
    holders: set[int]
    """Clients that hold it; empty: its creator has been told and may use the memory again."""
    unwanted: bool = False
    """Its creator does not want the memory back."""
    path: str = ""
    """Its name in the file system; empty: none, or no longer."""


@dataclass(slots=True)
class Ledger:
    """All segments of a session, by id."""

    clients: set[int] = field(default_factory=set)
    """Who is there."""
    entries: dict[int, Entry] = field(default_factory=dict)
    """Segment id -> entry."""
    waiting: list[Asked] = field(default_factory=list)
    """Questions about segments that nobody has registered yet: the message may be under way."""
    _names: Names = field(default_factory=Names)
    _held: dict[int, set[int]] = field(default_factory=dict)
    """Client -> ids of the segments that it holds."""
    _made: dict[int, set[int]] = field(default_factory=dict)
    """Client -> ids of the segments that it made."""

    @property
    def names(self) -> dict[str, int]:
        """Every name that may exist -> the client that said so."""
        return self._names.makers

    @property
    def records(self) -> tuple[str, ...]:
        """Every owner record that may exist."""
        return tuple(self._names.records)

    def step(self, event: Event) -> Sequence[Action]:
        """Take note of an event and return what has to be done, in this order."""
        match event:
            case Joined(client):
                self.clients.add(client)
                return []
            case Gone(client):
                return self._gone(client)
            case Drained():
                waiting, self.waiting = self.waiting, []
                return [self._refusal(asked, LostReason.UNKNOWN) for asked in waiting]
        if event.client not in self.clients:
            return [Offend(event.client, f"client {event.client} is not in this session")]
        match event:
            case Asked():
                return self._asked(event)
            case Registered():
                return self._registered(event)
            case Intended(client, path):
                if not self._names.add(path, client):
                    return [Offend(client, f"client {client} wants to make {path}, which is another's")]
                return []
            case Removed(client, path):
                if self.names.get(path) == client:
                    self._names.drop(path)
                return []
            case Released(client, segment):
                return self._release(client, segment)
            case WriteAllowed() | Forgotten():
                return self._decided(event)

    def _registered(self, event: Registered) -> list[Action]:
        client, segment = event.client, event.segment
        if creator_of(segment) != client:
            return [Offend(client, f"client {client} registered segment {segment:#x}, which is another's")]
        entry = self.entries.get(segment)
        if entry is not None:
            # Said twice (an interrupt): the first descriptor stays.
            if entry.nbytes != event.nbytes:
                return [Offend(client, f"segment {segment:#x} was registered again with another size")]
            entry.writable |= event.writable
            entry.unwanted = False
            self._hold(client, segment, entry)
            return []
        if event.path and not self._names.add(event.path, client):
            return [Offend(client, f"client {client} registered {event.path}, which is another's")]
        self.entries[segment] = entry = Entry(event.nbytes, event.writable, set(), path=event.path)
        self._made.setdefault(client, set()).add(segment)
        self._hold(client, segment, entry)
        actions: list[Action] = [Keep(segment)]
        asked = [question for question in self.waiting if question.segment == segment]
        self.waiting = [question for question in self.waiting if question.segment != segment]
        for question in asked:
            actions += self._asked(question)
        return actions

    def _asked(self, event: Asked) -> list[Action]:
        creator = creator_of(event.segment)
        entry = self.entries.get(event.segment)
        if entry is None:
            if creator in self.clients and creator != event.client:
                self.waiting.append(event)
                return []
            return [self._refusal(event, LostReason.UNKNOWN)]
        if not entry.holders and event.client != creator:
            # Its creator may be using the memory again for something else.
            return [self._refusal(event, LostReason.UNKNOWN)]
        if event.writable and not entry.writable and event.client != creator:
            return [self._refusal(event, LostReason.READ_ONLY)]
        fresh = event.client not in entry.holders
        self._hold(event.client, event.segment, entry)
        return [Grant(event.client, event.segment, entry.nbytes, event.writable, event.sequence, fresh)]

    def _release(self, client: int, segment: int, *, died: bool = False) -> list[Action]:
        entry = self.entries.get(segment)
        if entry is None or client not in entry.holders:
            # Said twice, after an interrupt: the answer may have been lost as well.
            unheld = entry is None or not entry.holders
            return [Idle(client, segment)] if unheld and client == creator_of(segment) else []
        entry.holders.discard(client)
        self._held[client].discard(segment)
        if entry.holders:
            return []
        creator = creator_of(segment)
        actions = self._unname(entry)
        if creator in self.clients and not entry.unwanted and not died:
            return [*actions, Idle(creator, segment)]
        self._delete(segment)
        if died and creator in self.clients and not entry.unwanted:
            actions.append(Drop(creator, segment))
        return [*actions, Close(segment)]

    def _unname(self, entry: Entry) -> list[Action]:
        path, entry.path = entry.path, ""
        if path not in self.names:
            return []
        return [Unlink(path), *map(Unrecord, self._names.bare([self._names.drop(path)], self.clients))]

    def _decided(self, event: WriteAllowed | Forgotten) -> list[Action]:
        client, segment = event.client, event.segment
        if creator_of(segment) != client:
            return [Offend(client, f"client {client} decides about segment {segment:#x}, which is another's")]
        entry = self.entries.get(segment)
        if entry is None:
            return []
        if isinstance(event, WriteAllowed):
            entry.writable = True
            return []
        entry.unwanted = True
        if entry.holders:
            return self._release(client, segment)
        self._delete(segment)
        return [Close(segment)]

    def _gone(self, client: int) -> list[Action]:
        self.clients.discard(client)
        self.waiting = [asked for asked in self.waiting if asked.client != client]
        actions: list[Action] = []
        for segment in sorted(self._held.get(client, ())):
            actions += self._release(client, segment, died=True)
        self._held.pop(client, None)
        for segment in sorted(self._made.pop(client, ())):
            entry = self.entries.get(segment)
            if entry is not None and not entry.holders:
                self._delete(segment)
                actions.append(Close(segment))
        in_use = {entry.path for entry in self.entries.values()}
        for path in sorted(path for path, maker in self.names.items() if maker == client):
            if path not in in_use:
                self._names.drop(path)
                actions.append(Unlink(path))
        return [*actions, *map(Unrecord, self._names.bare(self._names.records_of(client), self.clients))]

    def _hold(self, client: int, segment: int, entry: Entry) -> None:
        entry.holders.add(client)
        self._held.setdefault(client, set()).add(segment)

    def _delete(self, segment: int) -> None:
        del self.entries[segment]
        made = self._made.get(creator_of(segment))
        if made is not None:
            made.discard(segment)

    @staticmethod
    def _refusal(event: Asked, reason: LostReason) -> Refuse:
        return Refuse(event.client, event.segment, reason, event.sequence)
