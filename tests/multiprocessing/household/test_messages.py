"""Messages in flight: what can still be received is there, whatever is killed; the rest is gone."""

import os

import numpy as np
import pytest

import nbparallel as nbp
from nbparallel.errors import SegmentLostError
from nbparallel.multiprocessing import household
from nbparallel.transfer.pickling import loads
from tests.multiprocessing.household.family import Child, MailPipe, await_held


def value_of():
    """Return an array in memory of its own, a packed one, and a large private one."""
    return nbp.full((400, 400), 1.0), nbp.full(3, 2.0), np.full((400, 400), 3.0)


def check(received):
    """Look at what `value_of` returned."""
    assert [part.flat[-1] for part in received] == [1.0, 2.0, 3.0]
    received[2][0] = 4.0


def test_the_sender_may_drop_what_it_sent(root):
    """A message holds its arrays; when it was taken and dropped the memory is used again."""
    pipe = MailPipe()
    for _ in range(3):
        pipe.send(value_of())
        await_held(lambda rows: rows and all(row.messages and not row.holders for row in rows))
        received = pipe.receive()
        check(received)
        del received
        await_held(lambda rows: not any(row.messages for row in rows))
    pipe.close()


@pytest.mark.parametrize("point", ["put", "posted", "written"])
def test_a_producer_is_killed(root, point):
    """What was written can be received; what was not is gone with it."""
    pipe = MailPipe()

    def produce(stop):
        value = value_of()
        if point == "put":
            stop("put")
        packed = pipe.pack(value)
        if point == "posted":
            stop("posted")
        pipe.write(packed)
        stop("written")

    child = Child(produce)
    child.await_point(point)
    child.kill()
    if point == "written":
        received = pipe.receive()
        check(received)
        del received
    pipe.close()
    await_held(lambda rows: rows == [])


@pytest.mark.slow
@pytest.mark.parametrize("point", ["written", "read", "attached", "taken"])
def test_a_consumer_is_killed(root, point):
    """What lies in the pipe is received by the next one; what it had read is gone with it."""
    pipe = MailPipe()

    def consume(stop):
        member = household.membership()
        if point == "written":
            stop(point)
        parcel, data = pipe.read()
        if point == "read":
            stop(point)
        received = loads(data, member.store, broker=member.broker)
        if point == "attached":
            stop(point)
        member.take(parcel)
        check(received)
        stop("taken")

    child = Child(consume)
    pipe.send(value_of())
    child.await_point(point)
    child.kill()
    if point == "written":
        received = pipe.receive()
        check(received)
        del received
    # What was read and not taken stays as long as the pipe: that nothing of it is left is not known.
    pipe.close()
    await_held(lambda rows: rows == [])


def test_a_pipe_without_readers(root):
    """Its last reader ends, or closes it: what lies in it is dropped, and what is sent later as well."""
    pipe = MailPipe()
    pipe.send(value_of())
    child = Child(lambda stop: stop("reading"))
    child.await_point("reading")
    pipe.stop_reading()
    await_held(lambda rows: rows and all(row.messages for row in rows))
    child.kill()
    await_held(lambda rows: rows == [])
    pipe.pack(value_of())
    await_held(lambda rows: rows == [])
    os.close(pipe.write_end)


def test_reading_ends_travel(root):
    """A mailbox that a message carries is read by whoever receives it: nothing is dropped meanwhile."""
    outer, inner = MailPipe(), MailPipe()
    inner.send(value_of())
    parcel = root.post((), mailbox=outer.mailbox, carried=[inner.mailbox])
    root.close_mailbox(inner.mailbox)
    await_held(lambda rows: rows and all(row.messages and not row.holders for row in rows))
    root.open_mailbox(inner.mailbox)
    root.take(parcel)
    check(inner.receive())
    inner.close()
    outer.close()
    await_held(lambda rows: rows == [])


def test_a_message_that_is_never_taken(root):
    """Taken back by its sender, nothing stays; a second reading says that the memory is gone."""
    pipe = MailPipe()
    parcel, data, keep = pipe.pack(nbp.full((400, 400), 1.0))
    del keep
    root.withdraw(parcel)
    root.store.drain()
    await_held(lambda rows: not root.store.segments(root.broker) or root.store.pool.nbytes)
    with pytest.raises(SegmentLostError):
        loads(data, root.store, broker=root.broker)
    assert root.post(()) == 0
    root.take(0)
    pipe.close()


def test_a_producer_keeps_few_descriptors(root):
    """A hundred arrays lie in a pipe: the producer has descriptors of 16, and all of them arrive."""
    pipe = MailPipe()
    before = len(os.listdir("/proc/self/fd"))
    packed = []
    for number in range(100):
        parcel, data, keep = pipe.pack(nbp.full((200, 200), float(number)))
        packed.append((parcel, data))
        del keep
    root.store.drain()
    assert len(os.listdir("/proc/self/fd")) - before < 50
    for number, (parcel, data) in enumerate(packed):
        array = loads(data, root.store, broker=root.broker)
        root.take(parcel)
        assert array[0, 0] == number
        del array
    pipe.close()
    await_held(lambda rows: rows == [])
