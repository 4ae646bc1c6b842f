"""F74: the system refuses what a session needs: `StartError` with the reason, and nothing is left."""

from __future__ import annotations

import errno
import os
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nbparallel.errors import NbParallelError, StartError
from nbparallel.session import Session
from nbparallel.session.processes.supervisor_client import SupervisorClient
from nbparallel.sharing import Store
from nbparallel.testing.processes import family
from nbparallel.wire import control
from tests.harness.ranks import rank_pool
from tests.harness.sandboxes import run_script


def refuse(number: int, after: int) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator whose function fails from its call number `after` on."""
    calls: list[None] = []

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            calls.append(None)
            if len(calls) > after:
                raise OSError(number, os.strerror(number))
            return function(*args, **options)

        return call

    return decorate


@pytest.mark.matrix(cover=(), size=2)
@pytest.mark.time_limit(60)
@pytest.mark.parametrize(
    ("owner", "name", "after"),
    [
        (os, "memfd_create", 0),
        (os, "pidfd_open", 0),
        (os, "pidfd_open", 1),
        (os, "eventfd", 0),
        (os, "eventfd", 1),
        (os, "pipe2", 0),
        (os, "pipe2", 1),
        (os, "pipe2", 3),
        (socket, "socketpair", 0),
        (socket, "socketpair", 1),
        (socket, "socketpair", 2),
        (socket, "socketpair", 3),
        (control, "create", 0),
    ],
)
def test_f74_a_refused_call(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, after: int) -> None:
    """Whichever call it is, and however often it has worked: the reason, no leak, another try works."""
    session = Session(2)
    with monkeypatch.context() as patched:
        patched.setattr(owner, name, refuse(errno.EMFILE, after)(getattr(owner, name)))
        with pytest.raises(StartError, match=r"the system refused .*open files; .*ulimit -n"):
            session.run("1")
    with session:
        assert list(session.run("all_reduce(1)").values) == [2, 2]


@pytest.mark.slow
@pytest.mark.matrix(cover=())
@pytest.mark.parametrize("after", [0, 1])
def test_f74_a_refused_thread(monkeypatch: pytest.MonkeyPatch, after: int) -> None:
    """Of the session, or of a cell in the background, which then does not run without one."""
    start = threading.Thread.start
    started: list[threading.Thread] = []

    def refuse_thread(self: threading.Thread) -> None:
        started.append(self)
        if len(started) > after:
            raise RuntimeError("can't start new thread")
        start(self)

    session = Session(1)
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse_thread)
        with pytest.raises(StartError, match="the system refused a thread"):
            session.submit("import time\ntime.sleep(30)")
    assert session.started == bool(after)
    with session:
        assert list(session.run("rank").values) == [0]


@pytest.mark.slow
@pytest.mark.time_limit(60)
def test_f74_a_limit_on_the_size_of_files() -> None:
    """`ulimit -f`: shared memory counts as a file; the error names the limit, and so does the doctor."""
    with Session(1) as session:  # all byte code is there: below the limit CPython would leave truncated files
        session.run("1")
    done = run_script(
        """
        import resource, sys
        import numpy as np
        import nbparallel as nbp
        sys.dont_write_bytecode = True  # CPython would put a truncated file in its place
        resource.setrlimit(resource.RLIMIT_FSIZE, (16 << 10, 16 << 10))
        for use in (lambda: nbp.Session(2).run("1"), lambda: nbp.ones(100_000)):
            try:
                use()
            except nbp.errors.NbParallelError as error:
                print(type(error).__name__, error)
        print(*(finding.subject for finding in nbp.session.examine() if finding.state), sep="; ")
        """
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    segment, array, doctor = done.stdout.splitlines()
    assert segment.startswith("StartError the system refused the segment of "), segment
    assert "of 16.0 KiB on the size of files" in segment
    assert "ulimit -f unlimited" in segment
    assert array.startswith("SharedMemoryFullError"), array
    assert "`ulimit -f`" in array
    assert "size of files" in doctor


@pytest.mark.slow
@pytest.mark.matrix(cover=(), size=1)
@pytest.mark.time_limit(60)
@pytest.mark.parametrize("method", ["forkserver", "spawn"])
def test_f74_no_home(tmp_path: Path, method: str) -> None:
    """IPython on the ranks makes a temporary folder where it finds no home: none is left."""
    done = run_script(
        f"""
        import os, tempfile
        os.environ.update(HOME="/nonexistent/home", TMPDIR={str(tmp_path)!r})
        tempfile.tempdir = None
        os.environ.pop("IPYTHONDIR", None)
        import nbparallel as nbp
        with nbp.Session(2, start_method={method!r}) as session:
            print(*session.run("get_ipython().ipython_dir").values)
        """
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    assert f"{tmp_path}/tmp" in done.stdout, "IPython has made one"
    assert os.listdir(tmp_path) == []


STEPS: list[tuple[Any, str]] = [
    (SupervisorClient, "stop"),
    (SupervisorClient, "close"),
    (Store, "disconnect"),
]


@pytest.mark.slow
@pytest.mark.matrix(cover=())
@pytest.mark.may_leave("thread", "fd", reason="what raised may not have ended what it ends")
@pytest.mark.parametrize(("owner", "name"), STEPS)
def test_f74_stop_goes_on(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> None:
    """Whatever raises in between, all other steps are taken, and the error is raised at the end."""
    before = threading.enumerate()
    session = Session(1)
    session.run("1")
    function = getattr(owner, name)

    def fail(*args: Any, **options: Any) -> None:
        function(*args, **options)
        raise ZeroDivisionError

    with monkeypatch.context() as patched:
        patched.setattr(owner, name, fail)
        with pytest.raises(ZeroDivisionError):
            session.stop()
    left = {thread.name for thread in threading.enumerate() if thread not in before}
    assert not any(name.startswith("nbparallel-") for name in left), left
    assert list(family(os.getpid(), os.environ["NBP_TEST_RUN"])) == []
    assert session.closed
    session.stop()


@pytest.mark.slow
def test_f66_descriptors_of_the_session_that_the_notebook_closes() -> None:
    """`stop` ends all processes, and says what it found closed."""
    session = Session(1)
    session.run("1")
    os.close(rank_pool(session).handles[0].pidfd)
    with pytest.raises(OSError, match="Bad file descriptor"):
        session.stop()
    assert list(family(os.getpid(), os.environ["NBP_TEST_RUN"])) == []


@pytest.mark.slow
@pytest.mark.matrix(cover=())
@pytest.mark.parametrize("stream", ["stdout", "stderr"])
@pytest.mark.parametrize("value", ["None", "object()", "open('/dev/null', 'w')"])
def test_f66_a_cell_that_replaces_streams(stream: str, value: str) -> None:
    """Python's streams are put back before the next cell, and before what nbparallel itself prints."""
    with Session(2) as session:
        try:
            session.run(f"import sys\nw = all_reduce(1, async_op=True)\nsys.{stream} = {value}")
        except NbParallelError as error:
            print(error)
        cell = "import sys\nprint('out')\nprint('err', file=sys.stderr)\nall_reduce(rank)"
        result = session.run(cell)
        assert list(result.values) == [1, 1]
        assert result.ranks[0].stdout == "out\n"
        assert result.ranks[1].stderr == "err\n"
