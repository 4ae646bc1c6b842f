"""A session of clients that keep memory mapped, as the ledger sees it: sockets that are read in any order."""

from __future__ import annotations

from collections import defaultdict, deque

from nbparallel.supervisor.ledger.actions import (
    Close,
    Disconnect,
    Grant,
    Notify,
    StoreDescriptor,
)
from nbparallel.supervisor.ledger.ledger import Ledger
from nbparallel.wire.segments import (
    Drop,
    Ended,
    Fetch,
    Forget,
    Freed,
    Hold,
    Idle,
    Lost,
    Register,
    Release,
    Unmap,
    segment_id,
)

CLIENTS = 4


class KeptMemory:
    """Clients that make, give and drop arrays by the protocol; who looks at what is known for sure.

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
        self.holds = self.ends = 0
        for _ in range(CLIENTS):
            self.come()

    def come(self):
        """Let a client join."""
        client, self.next_client = self.next_client, self.next_client + 1
        self.sockets[client] = deque()
        self.ledger.client_joined(client)

    # the supervisor

    def step(self, client, message, sequence=0):
        """Let the ledger act on a message, and check what it wants."""
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
                self.ends += 1
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
            case Notify(_, Lost()) | Disconnect():
                raise AssertionError(f"nobody did anything wrong: {action}")
            case StoreDescriptor():
                pass

    def read(self):
        """Read one message of some client."""
        waiting = [client for client, socket in self.sockets.items() if socket]
        if waiting:
            self.step(*self.sockets[self.random.choice(waiting)].popleft())

    def settle(self, *, busy=True):
        """Read every socket to its end, in any order, while clients go on."""
        if not self.ledger.unsettled:
            return
        turn = self.ledger.mark()
        clients = list(self.sockets)
        self.random.shuffle(clients)
        for client in clients:
            while self.sockets[client]:
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

    def give(self):
        """Send an array; the sender keeps it until it has arrived."""
        there = [segment for segment, lookers in self.lookers.items() if lookers]
        if not there:
            return
        segment = self.random.choice(there)
        maker, memory = segment >> 40, self.memory_of[segment]
        others = [c for c in self.sockets if c not in self.lookers[segment] and c != maker]
        if not others:
            return
        client = self.random.choice(others)
        if segment >= self.kept[client].get(memory, segment + 1):
            del self.kept[client][memory]
            self.holds += 1
            self.sockets[client].append((client, Hold(segment, memory, True)))
        else:
            self.granted.discard((client, segment))
            self.sockets[client].append((client, Fetch(segment, False), 1))
            while (client, segment) not in self.granted:
                self.read()
        self.lookers[segment].add(client)

    def drop(self):
        """Let an array die."""
        there = [segment for segment, lookers in self.lookers.items() if lookers]
        if there:
            segment = self.random.choice(there)
            self.let_go(self.random.choice(sorted(self.lookers[segment])), segment)

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

    def die(self, client=None):
        """Kill a client; another one comes."""
        client = self.random.choice(list(self.sockets)) if client is None else client
        while self.sockets[client]:
            self.step(*self.sockets[client].popleft())
        del self.sockets[client]
        for lookers in self.lookers.values():
            lookers.discard(client)
        for store in (self.inboxes, self.kept, self.pools):
            store.pop(client, None)
        self.check_all(self.ledger.client_gone(client))
        self.settle_now()
        self.inboxes.pop(client, None)

    def client_acts(self):
        """Do one of the things that clients do."""
        acts = [self.make, self.give, self.give, self.give, self.drop, self.drop, self.listen]
        self.random.choice(acts)()

    def run(self, steps):
        """Do many things, then let go of everything and look what is left."""
        for _ in range(steps):
            what = self.random.random()
            if what < 0.55:
                self.client_acts()
            elif what < 0.85:
                self.read()
            elif what < 0.96:
                self.settle()
            elif what < 0.98:
                self.trim()
            else:
                self.die()
                self.come()
        for segment, lookers in self.lookers.items():
            for client in sorted(lookers):
                self.let_go(client, segment)
        self.come_to_rest()
        assert self.ledger.entries == {}, "something is kept that nobody looks at"
        for client in list(self.sockets):
            while self.pools[client]:
                self.sockets[client].append((client, Freed(self.pools[client].pop())))
        self.come_to_rest()
        assert self.ledger.memories.known == {}
        assert not any(self.kept.values()), "memory stays mapped that its owner has given back"

    def come_to_rest(self):
        """Read and say everything, until there is nothing more."""
        while any(self.sockets.values()) or any(self.inboxes.values()) or self.ledger.unsettled:
            while any(self.sockets.values()):
                self.read()
            self.settle(busy=False)
            for client in list(self.sockets):
                self.listen(client)
