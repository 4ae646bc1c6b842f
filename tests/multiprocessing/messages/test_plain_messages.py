"""Messages that hold nothing of ours: what the library would write, and as soon."""

from __future__ import annotations

import textwrap
from pathlib import Path

from tests.multiprocessing.programs import run_program


def test_a_plain_message_is_the_librarys(tmp_path: Path) -> None:
    """Queues and pipes write the bytes of the library's pickler, not a pickle within one."""
    body = """
    import multiprocessing.managers  # which registers how keys of a dictionary are pickled
    from multiprocessing.reduction import ForkingPickler

    plain = {"step": 17, "more": [1, 2.5, None], "call": (print, dict), "keys": {1: 2}.keys()}
    simple, (reader, writer), queue = ctx.SimpleQueue(), ctx.Pipe(duplex=False), ctx.Queue()
    for put, end in (simple.put, simple._reader), (writer.send, reader), (queue.put, queue._reader):
        for message in (plain, 17, None):
            put(message)
            assert end.recv_bytes() == bytes(ForkingPickler.dumps(message)), put
    """
    run_program(textwrap.dedent(body), tmp_path, "fork")


def test_a_queue_that_is_dropped_ends_its_thread(tmp_path: Path) -> None:
    """The thread that pickles for a queue does not keep it."""
    body = """
    queue = ctx.Queue()
    queue.put({"a": 1})
    assert queue.get(timeout=30) == {"a": 1}
    thread = queue._thread
    del queue
    thread.join(30)
    assert not thread.is_alive()
    """
    run_program(textwrap.dedent(body), tmp_path, "fork")
