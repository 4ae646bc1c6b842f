"""Clients that make arrays, send them through pipes, start others and die, as the ledger sees it."""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass

from nbparallel.supervisor.ledger.ledger import Ledger
from nbparallel.supervisor.ledger.records import (
    Close,
    Grant,
    Notify,
    StoreDescriptor,
)
from nbparallel.wire.segments import (
    CloseMailbox,
    Drop,
    Ended,
    Fetch,
    Forget,
    Freed,
    Hold,
    Idle,
    Lost,
    Open,
    Post,
    Register,
    Release,
    Take,
    Unmap,
    segment_id,
)

CLIENTS = 4
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


class MessagesInFlight:
    """Clients that act by the protocol; who looks at what is known, and sockets are read in any order.

    Arrays travel in pipes: no sender waits until what it sent has arrived.

    Parameters
    ----------
    random_ : random.Random
        Decides everything.
    settle_early : bool
        Act on the end of a segment without reading the other sockets: what must not be done.
    """

    def __init__(self, random_, *, settle_early=False):
        self.random = random_
        self.settle_early = settle_early
        self.ledger = Ledger()
        self.next_client = 0
        self.serials = defaultdict(int)
        self.sockets = {}
        self.inboxes = defaultdict(list)
        self.lookers = {}
        self.memory_of = {}
        self.pools = defaultdict(list)
        self.kept = defaultdict(dict)
        self.granted = set()
        self.parcels = 0
        self.open = {}
        self.pipes = {0: deque()}
        self.unborn = {}
        """Child that the supervisor has not admitted yet -> parent; it may die before."""
        self.ended_unborn = set()
        self.sent_by = {}
        self.received = self.dropped = self.forks = 0
        for _ in range(CLIENTS):
            self.open[self.come()] = set()

    def come(self):
        """Let a client join."""
        client, self.next_client = self.next_client, self.next_client + 1
        self.sockets[client] = deque()
        self.ledger.clients.add(client)
        return client

    # the supervisor

    def step(self, client, message, sequence=0):
        """Let the supervisor act on a frame."""
        match message:
            case Introduce(child, inherits):
                self.admit(client, child, inherits=inherits)
            case _:
                self.check_all(self.ledger.step(client, message, sequence))
        self.settle_now()

    def check_all(self, actions):
        """Check everything that the ledger wants."""
        for action in actions:
            self.check(action)

    def settle_now(self):
        """Settle too early, if the machine is to show that this is wrong."""
        if self.settle_early:
            waiting, self.ledger.waiting = self.ledger.waiting, []
            self.check_all(self.ledger.settle(self.ledger.mark()))
            self.ledger.waiting = waiting

    def check(self, action):
        """Fail if an action would take memory from somebody who looks at it."""
        match action:
            case Notify(client, Idle(segment) | Drop(segment)):
                assert not self.lookers.get(segment), "somebody looks at what its owner may use again"
                self.inboxes[client].append(action)
            case Close(segment):
                assert not self.lookers.get(segment), "somebody looks at what was closed"
            case Notify(client, Unmap(memory)):
                uses = [s for s, m in self.memory_of.items() if m == memory and self.lookers.get(s)]
                assert not uses, "somebody looks at memory that is of no more use"
                self.inboxes[client].append(action)
            case Notify(client, Ended()):
                self.inboxes[client].append(action)
            case Grant(client=client, segment=segment):
                self.granted.add((client, segment))
            case Notify(_, Lost()):
                raise AssertionError(f"nobody did anything wrong: {action}")
            case StoreDescriptor():
                pass

    def read(self):
        """Read one message of some client."""
        waiting = [client for client, socket in self.sockets.items() if socket]
        if waiting:
            self.step(*self.sockets[self.random.choice(waiting)].popleft())

    def admit(self, parent, child, *, inherits):
        """Make a client of a process that its parent has introduced; it may have ended."""
        client = self.come()
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

    def make(self):
        """Make an array, in memory from the pool if there is any."""
        client = self.random.choice(list(self.sockets))
        self.serials[client] += 1
        segment = segment_id(client, self.serials[client])
        pool = self.pools[client]
        memory = pool.pop() if pool else segment
        looked_at = [s for s, m in self.memory_of.items() if m == memory and self.lookers.get(s)]
        assert not looked_at, "memory was used again under somebody's array"
        self.memory_of[segment] = memory
        self.lookers[segment] = {client}
        self.sockets[client].append((client, Register(segment, 4096, True, memory=memory)))

    def let_go(self, client, segment):
        """Say that an array has died, and keep its memory mapped."""
        self.lookers[segment].discard(client)
        if client == segment >> 40:
            self.sockets[client].append((client, Release(segment)))
        else:
            self.kept[client][self.memory_of[segment]] = segment
            self.sockets[client].append((client, Release(segment, self.memory_of[segment])))

    def listen(self, client=None):
        """Act on what the supervisor said to a client."""
        client = self.random.choice(list(self.sockets)) if client is None else client
        for action in self.inboxes.pop(client, ()):
            match action:
                case Notify(_, Idle(segment)):
                    self.sockets[client].append((client, Forget(segment)))
                    self.pools[client].append(self.memory_of[segment])
                case Notify(_, Drop(segment)):
                    self.sockets[client].append((client, Freed(self.memory_of[segment])))
                case Notify(_, Ended(segment, memory)):
                    if memory in self.kept[client]:
                        self.kept[client][memory] = max(self.kept[client][memory], segment + 1)
                case Notify(_, Unmap(memory)):
                    self.kept[client].pop(memory, None)

    def trim(self):
        """Give pooled memory back to the system."""
        client = self.random.choice(list(self.sockets))
        while self.pools[client]:
            self.sockets[client].append((client, Freed(self.pools[client].pop())))

    def client_acts(self):
        """Do one of the things that clients do."""
        acts = [self.make, self.give, self.give, self.give, self.drop, self.drop, self.listen]
        self.random.choice(acts)()

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
        del self.sockets[client]
        for lookers in self.lookers.values():
            lookers.discard(client)
        for store in (self.inboxes, self.kept, self.pools):
            store.pop(client, None)
        self.check_all(self.ledger.client_gone(client))
        self.settle_now()
        self.inboxes.pop(client, None)

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
                self.open[self.come()] = set()
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

    def come_to_rest(self):
        """Read and say everything, until there is nothing more."""
        while any(self.sockets.values()) or any(self.inboxes.values()) or self.ledger.unsettled:
            while any(self.sockets.values()):
                self.read()
            self.settle(busy=False)
            for client in list(self.sockets):
                self.listen(client)
