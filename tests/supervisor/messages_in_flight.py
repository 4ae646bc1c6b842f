"""Clients that send arrays through pipes, start others and die, as the ledger sees it."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from nbparallel.supervisor.ledger.ledger import Ledger
from nbparallel.wire.parcels import CloseMailbox, Open, Post, Take
from nbparallel.wire.segments import Fetch, Hold, segment_id
from tests.supervisor.kept_memory import KeptMemory

UNBORN = 1 << 40
"""Children that have not been admitted look at what they inherit under numbers from here on."""


@dataclass(frozen=True)
class Message:
    """What lies in a pipe."""

    parcel: int
    segments: tuple[int, ...]
    carried: tuple[int, ...]


@dataclass(frozen=True)
class Introduce:
    """A frame of the process that starts `child`."""

    child: int
    inherits: bool


class MessagesInFlight(KeptMemory):
    """`KeptMemory` whose arrays travel in pipes: no sender waits until what it sent has arrived."""

    def __init__(self, random_, *, settle_early=False):
        self.parcels = 0
        self.open = {}
        self.pipes = {0: deque()}
        self.unborn = {}
        """Child that the supervisor has not admitted yet -> parent; it may die before."""
        self.ended_unborn = set()
        self.sent_by = {}
        self.received = self.dropped = self.forks = 0
        super().__init__(random_, settle_early=settle_early)

    def come(self):
        """Let a client join."""
        self.open[self.next_client] = set()
        super().come()

    # the supervisor

    def step(self, client, message, sequence=0):
        """Let the supervisor act on a frame."""
        match message:
            case Introduce(child, inherits):
                self.admit(client, child, inherits=inherits)
            case _:
                super().step(client, message, sequence)
                return
        self.settle_now()

    def admit(self, parent, child, *, inherits):
        """Make a client of a process that its parent has introduced; it may have ended."""
        client, self.next_client = self.next_client, self.next_client + 1
        self.sockets[client] = deque()
        self.ledger.client_joined(client)
        self.unborn.pop(child, None)
        if inherits:
            self.ledger.inherit(client, parent)
        for lookers in self.lookers.values():
            if child in lookers:
                lookers.discard(child)
                lookers.add(client)
        self.open[client] = self.open.pop(child, set())
        if child in self.ended_unborn:
            self.ended_unborn.discard(child)
            self.die(client)

    def settle(self, *, busy=True):
        """Read every socket that is there to its end, in any order; clients may come meanwhile."""
        if not self.ledger.unsettled:
            return
        turn = self.ledger.mark()
        clients = list(self.sockets)
        self.random.shuffle(clients)
        for client in clients:
            while self.sockets.get(client):
                self.step(*self.sockets[client].popleft())
            if busy and self.random.random() < 0.5:
                self.client_acts()
        self.check_all(self.ledger.settle(turn))

    # clients

    def say(self, client, message):
        """Write a frame."""
        self.sockets[client].append((client, message))

    def drop(self):
        """Let an array of a client die."""
        there = [(c, s) for s, lookers in self.lookers.items() for c in sorted(lookers) if c in self.sockets]
        if there:
            self.let_go(*self.random.choice(there))

    def new_id(self, client):
        """Return an id of a parcel or a mailbox."""
        self.parcels += 1
        return segment_id(client, self.parcels)

    def give(self):
        """Send or receive a message, open or close a mailbox."""
        acts = [self.send] * 9 + [self.receive] * 9 + [self.open_one, self.open_one, self.close_one]
        self.random.choice([*acts, self.fork, self.fork, self.spawn, self.end_unborn])()

    def send(self):
        """Post a message, with arrays and reading ends; the sender goes on at once."""
        client = self.random.choice(list(self.sockets))
        there = [s for s, lookers in self.lookers.items() if client in lookers]
        if not there:
            self.make()
        segments = tuple(self.random.sample(there, min(len(there), self.random.randrange(3))))
        known = sorted({m for opened in self.open.values() for m in opened} | {0})
        mailbox = self.random.choice(known)
        mine = sorted(self.open[client])
        carried = tuple(self.random.sample(mine, min(len(mine), self.random.choice([0, 0, 1]))))
        if not segments and not carried:
            return
        parcel = self.new_id(client)
        self.say(client, Post(parcel, mailbox, segments, carried))
        for segment in segments:
            self.lookers[segment].add(-parcel)
        self.pipes.setdefault(mailbox, deque()).append(Message(parcel, segments, carried))
        self.sent_by[parcel] = client, mailbox
        self.drop_unreadable()

    def receive(self):
        """Read a message: attach what it refers to, open what it carries, then say so."""
        client = self.random.choice(list(self.sockets))
        full = [m for m in sorted({*self.open[client], 0}) if self.pipes.get(m)]
        if not full:
            return
        message = self.pipes[self.random.choice(full)].popleft()
        self.received += 1
        for segment in message.segments:
            self.attach(client, segment)
        for mailbox in message.carried:
            self.open[client].add(mailbox)
            self.say(client, Open(mailbox))
        self.say(client, Take(message.parcel))
        for segment in message.segments:
            self.lookers[segment].discard(-message.parcel)
        self.drop_unreadable()

    def attach(self, client, segment):
        """Map a segment, by a request or on a mapping that was kept."""
        memory = self.memory_of[segment]
        if client in self.lookers[segment]:
            return
        if segment >= self.kept[client].get(memory, segment + 1) and client != segment >> 40:
            del self.kept[client][memory]
            self.holds += 1
            self.say(client, Hold(segment, memory, True))
        else:
            self.granted.discard((client, segment))
            self.sockets[client].append((client, Fetch(segment, False), 1))
            while (client, segment) not in self.granted:
                self.read()
        self.lookers[segment].add(client)

    def open_one(self):
        """Make a pipe."""
        client = self.random.choice(list(self.sockets))
        mailbox = self.new_id(client)
        self.open[client].add(mailbox)
        self.say(client, Open(mailbox))

    def close_one(self):
        """Close a reading end."""
        client = self.random.choice(list(self.sockets))
        if self.open[client]:
            mailbox = self.random.choice(sorted(self.open[client]))
            self.open[client].discard(mailbox)
            self.say(client, CloseMailbox(mailbox))
            self.drop_unreadable()

    def drop_unreadable(self):
        """Nobody looks at what lies in pipes that no process can read, not even through another pipe."""
        readable = {0, *(m for opened in self.open.values() for m in opened)}
        while (
            more := {m for r in readable for message in self.pipes.get(r, ()) for m in message.carried}
            - readable
        ):
            readable |= more
        for mailbox in [m for m in self.pipes if m not in readable]:
            for message in self.pipes.pop(mailbox):
                self.dropped += 1
                for segment in message.segments:
                    self.lookers[segment].discard(-message.parcel)

    # processes

    def fork(self):
        """Fork a client: the child looks at what its parent looks at."""
        if len(self.sockets) + len(self.unborn) > 8:
            return
        parent = self.random.choice(list(self.sockets))
        child = self.begin(parent, inherits=True)
        for lookers in self.lookers.values():
            if parent in lookers:
                lookers.add(child)
        self.open[child] = set(self.open[parent])
        self.forks += 1

    def spawn(self):
        """Start a process that inherits nothing."""
        if len(self.sockets) + len(self.unborn) > 8:
            return
        self.open[self.begin(self.random.choice(list(self.sockets)), inherits=False)] = set()

    def begin(self, parent, *, inherits):
        """Introduce a process, and start it."""
        self.parcels += 1
        child = UNBORN + self.parcels
        self.say(parent, Introduce(child, inherits))
        self.unborn[child] = parent
        return child

    def end_unborn(self):
        """Kill a process before the supervisor has read of it."""
        if self.unborn:
            child = self.random.choice(sorted(self.unborn))
            del self.unborn[child]
            self.ended_unborn.add(child)
            self.lose(child)

    def lose(self, child):
        """Forget a child that never was a client."""
        for lookers in self.lookers.values():
            lookers.discard(child)
        self.open.pop(child, None)
        self.drop_unreadable()

    def die(self, client=None):
        """Kill a client; what it sent before counts, such as that it starts a process."""
        client = self.random.choice(list(self.sockets)) if client is None else client
        while self.sockets[client]:
            self.step(*self.sockets[client].popleft())
        self.open.pop(client)
        self.drop_unreadable()
        super().die(client)

    def run(self, steps):
        """Do many things, then end everything and look at what is left."""
        for _ in range(steps):
            what = self.random.random()
            if what < 0.6:
                self.client_acts()
            elif what < 0.85:
                self.read()
            elif what < 0.95:
                self.settle()
            elif what < 0.97:
                self.trim()
            else:
                self.die()
                self.come()
        self.finish()

    def finish(self):
        """Let all go; what is in no mailbox is given up as the supervisor does, some time after."""
        self.come_to_rest()
        assert not self.unborn
        lying = {message.parcel for pipe in self.pipes.values() for message in pipe}
        assert set(self.ledger.parcels.parcels) == lying, "a message is kept that was taken"
        for client in list(self.sockets):
            self.die(client)
        for message in self.pipes.pop(0):
            for segment in message.segments:
                self.lookers[segment].discard(-message.parcel)
        self.drop_unreadable()
        for sender in range(self.next_client):
            for parcel in self.ledger.parcels.of(sender):
                self.check_all(self.ledger.end_parcel(parcel))
        self.come_to_rest()
        assert not any(self.lookers.values())
        assert self.ledger == Ledger(), "something is kept that nobody can get"
