"""F64: in a forked child everything is inert, and the parent does not notice its end."""

import os
import signal

import numpy as np
import pytest

from nbparallel.errors import ForkedRankError
from nbparallel.sharing import current_store, share
from nbparallel.wire.segments import Release
from tests.harness.stores import locked_store, own_sources, store_brokers


def in_child(function):
    """Fork, run `function` in the child, return its exit code."""
    pid = os.fork()
    if pid == 0:
        code = 99
        try:
            signal.alarm(10)
            code = function() or 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def forbidden(call):
    """Return 0 if `call` raises `ForkedRankError`."""
    try:
        call()
    except ForkedRankError:
        return 0
    return 1


def test_every_call_is_refused_in_a_forked_child(connected):
    """The store and its session's socket belong to the process that made them."""
    store = connected(0)
    array = store.zeros(100)
    handle = store.handle(array)
    calls = [
        lambda: store.zeros(1),
        lambda: store.share(np.zeros(1)),
        lambda: store.is_shared(array),
        lambda: store.location(array),
        lambda: store.handle(array),
        lambda: store.attach(handle),
        lambda: store.allow_write(array),
        store.drain,
        store.trim,
        store.segments,
        store.close,
        lambda: store.disconnect(store_brokers(store)[0]),
        lambda: store_brokers(store)[0].send(Release(handle.segment)),
        lambda: share(np.zeros(1)),
    ]
    current_store()
    assert in_child(lambda: sum(map(forbidden, calls))) == 0


def test_what_dies_in_a_child_lives_in_the_parent(connected, supervisor):
    """A child that drops every array, and ends, closes nothing of the parent's."""
    store = connected(0)
    array = store.zeros(1000)
    array[:] = 3
    segment = store.handle(array).segment
    holder = [array]
    sources = [own_sources(store)[segment]]

    def child():
        nonlocal array
        readable = array[0] == 3
        array = None
        holder.clear()
        sources.pop().close()
        return 0 if readable else 1

    assert in_child(child) == 0
    store.drain()
    assert array[999] == 3
    assert np.shares_memory(store.attach(store.handle(array)), array)
    # An answer shows that everything said before has been read.
    os.close(store_brokers(store)[0].fetch(segment, writable=True))
    assert supervisor.server.ledger.entries[segment].holders == {0}
    assert supervisor.offences == []


def test_a_fork_while_another_thread_holds_the_lock(store):
    """The child is refused at once; it does not wait for a lock that nobody will open."""
    import threading

    locked, leave = threading.Event(), threading.Event()

    def hold():
        with locked_store(store):
            locked.set()
            leave.wait(10)

    thread = threading.Thread(target=hold)
    thread.start()
    locked.wait(10)
    try:
        assert in_child(lambda: forbidden(store.drain)) == 0
    finally:
        leave.set()
        thread.join(10)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["return", "exit", "exception"])
def test_a_child_that_ends_as_python_does(way, tmp_path):
    """A forked child that runs all of the interpreter's clean-up harms nothing in the parent."""
    import subprocess
    import sys

    script = tmp_path / "script.py"
    script.write_text(
        f"""
import os, sys
import nbparallel.sharing as nbp
array = nbp.zeros(1000); array[:] = 5
keep = [nbp.zeros(10) for _ in range(5)]
pid = os.fork()
if pid == 0:
    del keep
    if {way!r} == "exit": sys.exit(0)
    if {way!r} == "exception": raise KeyError("expected")
    sys.modules["__main__"].array = None
else:
    os.waitpid(pid, 0)
    assert array[999] == 5 and nbp.is_shared(keep[4])
    nbp.zeros(10)
    print("fine")
"""
    )
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=15, check=True
    )
    assert done.stdout == "fine\n"
    assert "Exception ignored" not in done.stderr


def test_a_mapping_is_the_childs_as_well(connected, peer):
    """What the parent unmaps the child reads on, and the other way round: fetched memory, no descriptor."""
    store = connected(0)
    arrays = [store.zeros(300_000, "u1") for _ in range(20)]
    for number, array in enumerate(arrays):
        array[:] = number
    source = """
import gc, os
fetched = [store.attach(handle) for handle in handles]
before = len(os.listdir("/proc/self/fd"))
to_child, to_parent = os.pipe(), os.pipe()
pid = os.fork()
if pid == 0:
    code = 1
    try:
        os.close(to_child[1]); os.close(to_parent[0])
        del fetched[:10]
        gc.collect()
        os.write(to_parent[1], b"dropped")
        os.read(to_child[0], 1)
        code = 0 if [int(a[-1]) for a in fetched] == list(range(10, 20)) else 2
    finally:
        os._exit(code)
os.close(to_child[0]); os.close(to_parent[1])
assert os.read(to_parent[0], 7) == b"dropped"
seen = [int(a[-1]) for a in fetched]
fetched.clear()
gc.collect()
store.drain(); store.trim()
os.close(to_child[1]); os.close(to_parent[0])
result = seen, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
"""
    seen, code = peer.run(source, handles=[store.handle(array) for array in arrays])
    assert (seen, code) == (list(range(20)), 0)
