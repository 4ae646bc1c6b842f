# ruff: noqa: D102
"""Several stores of one session as a state machine: content stays, memory comes back."""

import gc

from hypothesis import HealthCheck, given, settings, strategies as st

from nbparallel.errors import SegmentLostError
from nbparallel.sharing.lifecycle.segment import ALIGNMENT
from tests.harness.stores import mark_interrupted, store_usage
from tests.harness.tiers import examples

MOVES = st.lists(
    st.tuples(
        st.sampled_from(["make", "make", "view", "send", "send", "drop", "drop", "drain", "doubt", "kill"]),
        st.integers(0, 2),
        st.integers(0, 2),
        st.integers(0, 1 << 16),
    ),
    max_size=60,
)


class World:
    """A notebook and two ranks that make, send, view and drop arrays, and a model of their content."""

    def __init__(self, exchange):
        self.exchange = exchange
        self.stores = {}
        self.arrays = {}
        self.values = 0
        self.next_client = 3
        self.places = {0: 0, 1: 1, 2: 2}
        for client in range(3):
            self.start(client)

    def start(self, client):
        self.stores[client] = self.exchange.store(client, pool_nbytes=1 << 16)
        self.arrays[client] = []

    def move(self, what, one, other, number):
        client, target = self.places[one], self.places[other]
        arrays = self.arrays[client]
        picked = arrays[number % len(arrays)] if arrays else None
        if what == "make":
            self.values += 1
            strategy = "file_descriptor" if number % 2 else None  # packed with others, or alone
            size = (0, 1, 65, 800, 800, 800, 5000, 100_000)[number // 2 % 8]
            array = self.stores[client].empty(size, "u1", strategy=strategy, for_all=number % 3 == 0)
            assert array.ctypes.data % ALIGNMENT == 0
            array[:] = self.values % 251
            arrays.append((array, self.values % 251))
        elif what == "drain":
            self.stores[client].drain()
        elif what == "doubt":
            mark_interrupted(self.stores[client])
        elif what == "kill" and one != 0:
            self.exchange.kill(client).close()
            del self.stores[client], self.arrays[client]
            self.places[one] = self.next_client
            self.next_client += 1
            self.start(self.places[one])
        elif picked is None:
            return
        elif what == "drop":
            del arrays[number % len(arrays)]
        elif what == "view":
            arrays.append((picked[0][:: -1 - number % 3][number % 50 :], picked[1]))
        elif what == "send":
            array, value = picked
            handle = self.stores[client].handle(array)
            if handle is None:
                return  # a private mapping
            private = number % 5 == 0
            try:
                arrived = self.stores[target].attach(handle, private=private)
            except SegmentLostError as error:
                raise AssertionError("a living array could not be sent") from error
            self.arrays[target].append((arrived, value))

    def check(self):
        for client, arrays in self.arrays.items():
            for array, value in arrays:
                assert (array == value).all(), f"client {client} sees other content"


@settings(
    deadline=None, max_examples=examples(150), suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(moves=MOVES)
def test_whatever_they_do(fresh_exchange, moves):
    """Nobody's content ever changes, and in the end nobody has and the supervisor keeps nothing."""
    exchange = fresh_exchange()
    world = World(exchange)
    for move in moves:
        world.move(*move)
        world.check()
    for arrays in world.arrays.values():
        arrays.clear()
    for _ in range(3):
        for store in world.stores.values():
            store.drain()
    assert exchange.server.ledger.entries == {}
    for store in world.stores.values():
        assert {record.phase for record in store.segments()} <= {"pooled"}
        store.trim()
        assert store.segments() == ()
        assert store_usage(store) == (0, 0, 0, 0, 0)
    assert exchange.server.ledger.memories.known == {}, "somebody may keep mapped what nobody has"
    exchange.close()
    del world
    gc.collect(0)
