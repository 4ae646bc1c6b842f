# ruff: noqa: D102
"""Stores that are connected: in one thread without sockets, over sockets, and in other processes."""

from __future__ import annotations

import os
import pickle
import select
import subprocess
import sys
import threading
from collections import defaultdict, deque
from pathlib import Path

import pytest

from nbparallel.channel import Channel, SegmentClient
from nbparallel.channel.segment_client import lost_error
from nbparallel.errors import ChannelClosedError, ProtocolError
from nbparallel.sharing import Store
from nbparallel.supervisor.ledger.segment_server import SegmentServer
from nbparallel.wire.frames import Frame, Kind
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
        self.server.ledger.client_joined(client)
        store = Store(client, **keywords)
        store.connect(Broker(self, client))
        self.stores[client] = store
        return store

    def broker(self, client):
        """Return the broker that a client's store uses."""
        return next(b for b in store_brokers(self.stores[client]) if b.exchange is self)

    def adopt(self, store):
        """Let a store take part that is in another session already; return its broker."""
        self.server.ledger.client_joined(store.client)
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
            self.deliver(self.server.settle(self.server.ledger.mark()))

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
        self.deliver(self.server.client_gone(client))
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


class Supervisor:
    """A desk in a thread, as the supervisor's loop runs it, over real sockets."""

    def __init__(self):
        self.server = SegmentServer()
        self.channels = {}
        self.offences = []
        self.lock = threading.Lock()
        self.stopping = threading.Event()
        self.thread = threading.Thread(target=self.serve, name="supervisor")
        self.thread.start()

    def join(self, client):
        """Return the client's end of a new segment socket."""
        ours, theirs = Channel.pair()
        with self.lock:
            self.server.ledger.client_joined(client)
            self.channels[client] = Channel(ours)
        return theirs

    def serve(self):
        while not self.stopping.is_set():
            with self.lock:
                clients = dict(self.channels)
            poll = select.poll()
            for channel in clients.values():
                poll.register(channel, select.POLLIN)
            poll.poll(5)
            with self.lock:
                for client, channel in clients.items():
                    self.take(client, channel)
                if self.server.ledger.unsettled:
                    turn = self.server.ledger.mark()
                    for client, channel in clients.items():
                        self.take(client, channel)
                    self.send(self.server.settle(turn))

    def take(self, client, channel):
        if self.channels.get(client) is not channel:
            return
        try:
            while (frame := channel.receive_nowait()) is not None:
                self.send(self.server.receive(client, frame))
        except (ChannelClosedError, ProtocolError) as error:
            if isinstance(error, ProtocolError):
                self.offences.append((client, str(error)))
            self.channels.pop(client).close()
            self.send(self.server.client_gone(client))

    def send(self, outgoing):
        for frame in outgoing:
            channel = self.channels.get(frame.client)
            try:
                if channel is not None:
                    message = frame.message
                    channel.send(message.kind, message.pack(), fds=frame.fds, sequence=frame.sequence)
            except ChannelClosedError:
                pass  # its end is noticed at the next poll
            finally:
                frame.close()

    def close(self):
        self.stopping.set()
        self.thread.join(WAIT)
        for channel in self.channels.values():
            channel.close()
        self.server.close()


class Peer:
    """Another process with a connected store, that runs what it is told to."""

    def __init__(self, supervisor, client):
        segments = supervisor.join(client)
        ours, theirs = Channel.pair()
        self.channel = Channel(ours)
        script = Path(__file__).with_name("peer.py")
        fds = (segments.fileno(), theirs.fileno())
        self.process = subprocess.Popen(
            [sys.executable, str(script), str(client), *map(str, fds)], pass_fds=fds
        )
        segments.close()
        theirs.close()

    def run(self, source, **names):
        """Execute `source` there and return what it assigned to ``result``."""
        self.channel.send(Kind.TASK, pickle.dumps((source, names)))
        frame = self.channel.receive(WAIT)
        assert frame is not None, "the peer did not answer"
        result, error = pickle.loads(frame.payload)
        if error is not None:
            raise error
        return result

    def kill(self):
        self.process.kill()
        self.process.wait(WAIT)

    def close(self):
        self.channel.close()
        self.process.kill()
        self.process.wait(WAIT)


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
def supervisor():
    """Make a session whose desk is served by a thread."""
    supervisor = Supervisor()
    yield supervisor
    supervisor.close()


@pytest.fixture
def connected(supervisor):
    """Make stores that are connected over sockets."""
    made = []

    def make(client, **keywords):
        broker = SegmentClient(Channel(supervisor.join(client)), client)
        store = Store(client)
        store.connect(broker)
        made.append((store, broker))
        return store

    yield make
    for store, broker in made:
        store.close()
        broker.close()


@pytest.fixture
def peer(supervisor):
    """Start another process, client 1."""
    peer = Peer(supervisor, 1)
    yield peer
    peer.close()


@pytest.fixture
def store():
    """Make a store without a session, which keeps memory for reuse all the same."""
    store = Store(pool_nbytes=1 << 28)
    yield store
    store.close()
