"""Memory that stays mapped between its uses: who waits for no answer loses nothing all the same."""

import pytest

from nbparallel.supervisor.ledger.actions import (
    Close,
    Disconnect,
    Grant,
    Notify,
    StoreDescriptor,
)
from nbparallel.supervisor.ledger.ledger import Ledger
from nbparallel.wire.segments import (
    AllowWrite,
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

FIRST, SECOND, THIRD = (segment_id(0, serial) for serial in (1, 2, 3))


@pytest.fixture
def book():
    """Make a ledger: client 1 keeps the memory of client 0, whose first use has ended."""
    book = Ledger()
    for client in (0, 1, 2):
        book.client_joined(client)
    assert book.step(0, Register(FIRST, 4096, False, memory=FIRST)) == [StoreDescriptor(FIRST)]
    book.step(1, Fetch(FIRST, False), 1)
    book.step(0, Release(FIRST))
    assert book.step(1, Release(FIRST, FIRST)) == []
    assert drained(book) == [Notify(1, Ended(FIRST, FIRST)), Notify(0, Idle(FIRST))]
    assert book.step(0, Forget(FIRST)) == [Close(FIRST)]
    return book


def drained(book):
    """Let everything have been read."""
    return list(book.settle(book.mark()))


def register(book, segment=SECOND, *, writable=False):
    """Use the memory again."""
    return book.step(0, Register(segment, 4096, writable, memory=FIRST))


def test_a_hold_counts_as_a_fetch(book):
    """The owner's release does not end what a keeper holds."""
    register(book)
    assert book.step(1, Hold(SECOND, FIRST, False)) == []
    assert book.step(0, Release(SECOND)) == []
    assert drained(book) == []
    assert book.entries[SECOND].holders == {1}
    book.step(1, Release(SECOND, FIRST))
    assert drained(book) == [Notify(1, Ended(SECOND, FIRST)), Notify(0, Idle(SECOND))]


def test_a_hold_that_was_read_after_the_release(book):
    """The end of a segment waits until everything has been read that was sent before."""
    register(book)
    assert book.step(0, Release(SECOND)) == []
    assert book.unsettled
    turn = book.mark()
    assert book.step(1, Hold(SECOND, FIRST, False)) == []
    assert book.settle(turn) == []
    assert book.entries[SECOND].holders == {1}


def test_what_ends_while_sockets_are_read_waits_for_the_next_time(book):
    """A socket that has been read already may hold a message that counts."""
    register(book)
    turn = book.mark()
    book.step(0, Release(SECOND))
    assert book.settle(turn) == []
    assert drained(book) == [Notify(1, Ended(SECOND, FIRST)), Notify(0, Idle(SECOND))][1:]


def test_a_hold_that_overtook_the_registration(book):
    """It counts when the registration comes; a release that overtook it as well takes it back."""
    book.step(1, Hold(SECOND, FIRST, False))
    assert book.unsettled
    register(book)
    assert book.entries[SECOND].holders == {0, 1}
    book.step(1, Hold(THIRD, FIRST, False))
    book.step(1, Release(THIRD, FIRST))
    register(book, THIRD)
    assert book.entries[THIRD].holders == {0}


def test_a_hold_of_what_has_ended_is_ignored(book):
    """Nobody holds it afterwards, and its owner is told nothing again."""
    register(book)
    book.step(0, Release(SECOND))
    drained(book)
    assert book.step(1, Hold(SECOND, FIRST, False)) == []
    assert book.entries[SECOND].holders == set()
    assert book.step(1, Hold(THIRD, FIRST, False)) == []
    assert drained(book) == []


@pytest.mark.parametrize(
    ("client", "message"),
    [
        (2, Hold(SECOND, FIRST, False)),
        (1, Hold(SECOND, FIRST, True)),
        (0, Release(SECOND, FIRST)),
        (1, Freed(FIRST)),
        (0, Register(THIRD, 8192, False, memory=FIRST)),
        (0, Register(THIRD, 4096, False, memory=segment_id(1, 1))),
    ],
)
def test_who_says_what_it_may_not(book, client, message):
    """A hold of what was never mapped, or with a right that nobody has; others' memory; sizes that differ."""
    register(book)
    (action,) = book.step(client, message)
    assert isinstance(action, Disconnect)
    assert action.client == client
    assert book.entries[SECOND].holders == {0}


def test_a_damaged_handle_costs_nobody_his_life(book):
    """Who names the wrong memory holds nothing, keeps what it kept, and gets nothing that it could mix up."""
    register(book)
    book.step(0, Register(THIRD, 4096, False, memory=THIRD))
    assert book.step(1, Hold(THIRD, FIRST, False)) == []
    assert book.entries[THIRD].holders == {0}
    assert book.step(1, Release(THIRD, FIRST)) == []
    assert book.step(1, Hold(SECOND, FIRST, False)) == []
    (refusal,) = book.step(2, Fetch(THIRD, False, FIRST), 1)
    assert isinstance(refusal.message, Lost)
    (grant,) = book.step(2, Fetch(THIRD, False, THIRD), 2)
    assert isinstance(grant, Grant)


def test_the_right_to_write_may_come_later(book):
    """What may be written to may be held for writing."""
    register(book)
    book.step(0, AllowWrite(SECOND))
    assert book.step(1, Hold(SECOND, FIRST, True)) == []


def test_a_keeper_that_says_nothing_is_told_once(book):
    """What a rank that computes for hours is told does not pile up."""
    for serial in range(2, 20):
        register(book, segment_id(0, serial))
        book.step(0, Release(segment_id(0, serial)))
        assert drained(book) == [Notify(0, Idle(segment_id(0, serial)))]


def test_memory_that_its_owner_gives_back_is_unmapped(book):
    """Every keeper is told; not while somebody holds a use of it."""
    register(book)
    book.step(1, Hold(SECOND, FIRST, False))
    assert book.step(0, Freed(FIRST)) == []
    assert book.step(0, Forget(SECOND)) == []
    book.step(1, Release(SECOND, FIRST))
    assert drained(book) == [Close(SECOND), Notify(1, Ended(SECOND, FIRST)), Notify(1, Unmap(FIRST))]
    assert book.step(0, Freed(FIRST)) == []
    assert book.step(1, Release(SECOND, FIRST)) == [Notify(1, Unmap(FIRST))]


def test_all_others_return_what_they_keep_if_one_has_no_room(book):
    """It says so by freeing no memory at all; what is known of memories stays."""
    assert book.step(1, Freed(0)) == [Notify(0, Unmap(0)), Notify(2, Unmap(0))]
    assert book.step(0, Freed(FIRST)) == [Notify(1, Unmap(FIRST))]


def test_a_dead_owners_memory_is_unmapped(book):
    """Nobody will use it again."""
    assert book.client_gone(0) == [Notify(1, Unmap(FIRST))]


def test_a_dead_keeper_is_forgotten(book):
    """It is told nothing."""
    book.client_gone(1)
    assert book.step(0, Freed(FIRST)) == []


def test_what_a_dead_client_held_is_not_used_again(book):
    """It may have given it to a keeper whose hold comes too late: other holders' release changes nothing."""
    register(book)
    book.step(1, Hold(SECOND, FIRST, False))
    book.client_gone(1)
    assert book.step(0, Release(SECOND)) == []
    assert drained(book) == [Notify(0, Drop(SECOND)), Close(SECOND)]
