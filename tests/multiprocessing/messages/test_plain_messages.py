"""Messages that hold nothing of ours: what the library would write, and as soon."""

from __future__ import annotations

import textwrap
from pathlib import Path

from tests.multiprocessing.programs import run_program


def test_a_plain_message_is_the_librarys(tmp_path: Path) -> None:
    """Queues and pipes write the bytes of the library's pickler, not a pickle within one."""
    body = """
    import multiprocessing.managers  # which registers how keys of a dictionary are pickled
    from multiprocessing.connection import Connection
    from multiprocessing.reduction import ForkingPickler

    plain = {"step": 17, "more": [1, 2.5, None], "call": (print, dict), "keys": {1: 2}.keys()}
    received, recv_bytes = [], Connection.recv_bytes
    def recorded(end, *args):
        received.append(recv_bytes(end, *args))
        return received[-1]
    Connection.recv_bytes = recorded

    simple, (reader, writer), queue = ctx.SimpleQueue(), ctx.Pipe(duplex=False), ctx.Queue()
    for put, get in (simple.put, simple.get), (writer.send, reader.recv_bytes), (queue.put, queue.get):
        for message in (plain, 17, None):
            put(message)
            get()
            assert received.pop() == bytes(ForkingPickler.dumps(message)), put
    assert not received
    """
    run_program(textwrap.dedent(body), tmp_path, "fork")


def test_a_queue_that_is_dropped_ends_its_thread(tmp_path: Path) -> None:
    """The thread that pickles for a queue does not keep it."""
    body = """
    import threading

    queue = ctx.Queue()
    queue.put({"a": 1})
    assert queue.get(timeout=30) == {"a": 1}
    (thread,) = [thread for thread in threading.enumerate() if thread.name == "QueueFeederThread"]
    del queue
    thread.join(30)
    assert not thread.is_alive()
    """
    run_program(textwrap.dedent(body), tmp_path, "fork")
