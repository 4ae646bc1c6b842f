"""What a start of a process leaves out: imports in the child, our own pickler, word to the supervisor."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.multiprocessing.programs import run_program

RECORDER = """
import os, sys
before = []
os.register_at_fork(after_in_child=lambda: before.append(set(sys.modules)))
def write_new(path):
    with open(path, "w") as file:
        file.write(" ".join(sorted(set(sys.modules) - before[-1])))
"""


def test_the_server_has_loaded_what_a_process_needs(tmp_path: Path) -> None:
    """A process that the fork server forks imports nothing, wherever its function was defined."""
    (tmp_path / "recorder.py").write_text(RECORDER)
    run_program(
        """
        import recorder

        def write_new(path):
            recorder.write_new(path)

        ctx.set_forkserver_preload(["recorder"])
        for target in (recorder.write_new, write_new):
            process = ctx.Process(target=target, args=("new",))
            process.start()
            process.join()
            with open("new") as file:
                assert (new := file.read()) == "", new
            os.remove("new")
        """,
        tmp_path,
        "forkserver",
    )


PLAIN = """
import multiprocessing
import nbparallel.multiprocessing as mp

def check(authkey, values, *, flag):
    process = multiprocessing.current_process()
    assert bytes(process.authkey) == authkey
    assert (process.name, process.daemon, values, flag) == ("plain", True, {"one": [1, (2.0, None)]}, True)

class Stateful(mp.get_context("forkserver").Process):
    def __getstate__(self):
        return {**vars(self), "_args": ("it", "says", "so")}

    def run(self):
        raise SystemExit(len(self._args))
"""


@pytest.mark.slow
@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_a_plain_process_needs_no_pickler_of_ours(method: str, tmp_path: Path) -> None:
    """If all that it has can be imported, it travels as from the library: name, key and arguments too."""
    (tmp_path / "plain.py").write_text(PLAIN)
    run_program(
        """
        import plain
        from nbparallel.multiprocessing.starting import process_state

        process_state.pack = None
        arguments = b"its own", {"one": [1, (2.0, None)]}
        process = ctx.Process(target=plain.check, args=arguments, kwargs={"flag": True}, name="plain")
        process.daemon, process.authkey = True, b"its own"
        process.start()
        process.join()
        assert process.exitcode == 0
        """,
        tmp_path,
        method,
    )


@pytest.mark.slow
def test_a_class_with_a_state_of_its_own(tmp_path: Path) -> None:
    """Its `__getstate__` is asked."""
    (tmp_path / "plain.py").write_text(PLAIN)
    run_program(
        """
        import plain

        process = plain.Stateful(args=(1,))
        process.start()
        process.join()
        assert process.exitcode == 3
        """,
        tmp_path,
    )


SHARES_NOTHING = """
import os
import nbparallel as nbp
from nbparallel.errors import ForkedRankError
from nbparallel.sharing import store
from tests.harness.stores import has_store

def child():
    assert not has_store()
    pid = os.fork()
    if not pid:
        try:
            store.current_store()
        except ForkedRankError:
            os._exit(7)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
    assert not has_store()
    array = nbp.ones(3)
    assert store.current_store().connected() and nbp.is_shared(array)
"""


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_a_process_that_shares_nothing_has_no_store(method: str, tmp_path: Path) -> None:
    """It makes one when it first needs it; a plain fork of it shares nothing, as of any other."""
    (tmp_path / "nothing.py").write_text(SHARES_NOTHING)
    run_program(
        """
        import nothing

        process = ctx.Process(target=nothing.child)
        process.start()
        process.join()
        assert process.exitcode == 0
        """,
        tmp_path,
        method,
    )
