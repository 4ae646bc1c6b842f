"""F64: in a forked child everything is inert, and the parent does not notice its end."""

import os
import signal

import numpy as np
import pytest

from nbparallel.errors import ForkedRankError
from nbparallel.sharing import current_store, share
from tests.harness.stores import locked_store, store_brokers


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


def test_every_call_is_refused_in_a_forked_child(exchange):
    """The store belongs to the process that made it."""
    store = exchange.store(0)
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
        lambda: share(np.zeros(1)),
    ]
    current_store()
    assert in_child(lambda: sum(map(forbidden, calls))) == 0


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
