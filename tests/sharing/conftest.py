# ruff: noqa: D102
"""Stores that are connected: in one thread without sockets, over sockets, and in other processes."""

from __future__ import annotations

import os
from collections import defaultdict, deque

import pytest

from nbparallel.channel.channel import lost_error
from nbparallel.sharing import Store
from nbparallel.supervisor.ledger.segment_server import SegmentServer
from nbparallel.wire.frames import Frame
from nbparallel.wire.segments import Drop, Fetch, Fetched, Idle, Lost
from tests.harness.stores import store_brokers

WAIT = 10.0


class Exchange:
    """A session's desk and brokers that speak to it at once, in this thread."""

    def __init__(self):
        self.server = SegmentServer()
        self.inboxes = defaultdict(deque)
        self.stores = {}
        self.said = []

    def store(self, client, **keywords):
        """Return a connected store for a client."""
        self.server.ledger.clients.add(client)
        store = Store(client, **keywords)
        store.connect(Broker(self, client))
        self.stores[client] = store
        return store

    def broker(self, client):
        """Return the broker that a client's store uses."""
        return next(b for b in store_brokers(self.stores[client]) if b.exchange is self)

    def adopt(self, store):
        """Let a store take part that is in another session already; return its broker."""
        self.server.ledger.clients.add(store.client)
        broker = Broker(self, store.client)
        store.connect(broker)
        self.stores[store.client] = store
        return broker

    def say(self, client, kind, payload, fds=(), sequence=0):
        self.said.append((client, kind))
        self.deliver(self.server.receive(client, Frame(kind, 0, sequence, payload, list(fds))))
        self.settle()

    def settle(self):
        """Decide what waits: there is nothing under way here."""
        while self.server.ledger.unsettled:
            self.deliver(self.server.perform(self.server.ledger.settle(self.server.ledger.mark())))

    def deliver(self, outgoing):
        for frame in outgoing:
            if frame.client in self.stores:
                self.inboxes[frame.client].append(frame)
            else:
                frame.close()

    def kill(self, client):
        """End a client as if its process had died: its store says nothing any more."""
        store = self.stores.pop(client)
        for broker in store_brokers(store):
            store.disconnect(broker)
        for frame in self.inboxes.pop(client, ()):
            frame.close()
        self.deliver(self.server.perform(self.server.ledger.client_gone(client)))
        self.settle()
        return store

    def close(self):
        for client in list(self.stores):
            self.kill(client).close()
        self.server.close()


class Broker:
    """`SegmentBroker` without sockets."""

    def __init__(self, exchange, client):
        self.exchange = exchange
        self.client = client

    def send(self, message, fd=None, sequence=0):
        fds = [] if fd is None else [os.dup(fd)]
        self.exchange.say(self.client, message.kind, message.pack(), fds, sequence)

    def fetch(self, segment, *, writable, memory=0):
        self.send(Fetch(segment, writable, memory), sequence=1)
        inbox = self.exchange.inboxes[self.client]
        answer = next(reply for reply in inbox if isinstance(reply.message, Fetched | Lost))
        inbox.remove(answer)
        if isinstance(answer.message, Lost):
            raise lost_error(answer.message, segment)
        about = (Idle(segment), Drop(segment))
        self.exchange.inboxes[self.client] = deque(reply for reply in inbox if reply.message not in about)
        return answer.fds.pop()

    def notices(self):
        inbox = self.exchange.inboxes[self.client]
        notices = [reply.message for reply in inbox]
        inbox.clear()
        return notices


@pytest.fixture
def exchange():
    """Make a session within this thread."""
    exchange = Exchange()
    yield exchange
    exchange.close()


@pytest.fixture
def fresh_exchange():
    """Return what makes a session within this thread, for every example a new one."""
    return Exchange


@pytest.fixture
def second_exchange():
    """Make another session within this thread."""
    exchange = Exchange()
    yield exchange
    exchange.close()


@pytest.fixture
def store():
    """Make a store without a session, which keeps memory for reuse all the same."""
    store = Store(pool_nbytes=1 << 28)
    yield store
    store.close()
