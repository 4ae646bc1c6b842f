"""A rank process from start to exit: connections, main loop.

`serve` runs in a process that the template forked (or that the supervisor started afresh); it never
returns.  The loop waits for frames of the kernel; a task runs in the main thread, as in a notebook.
"""

from __future__ import annotations

import faulthandler
import os
import pickle
import select
import signal
import sys
from typing import NoReturn

from nbparallel import sharing
from nbparallel.channel import Channel
from nbparallel.channel.segment_client import SegmentClient
from nbparallel.engine import shell as shells
from nbparallel.engine.engine import Engine
from nbparallel.errors import ChannelClosedError
from nbparallel.sharing.strategies.owned_names import process_names
from nbparallel.supervisor.children import die_with_parent
from nbparallel.wire.frames import Kind
from nbparallel.wire.identity import pack_pid, pack_versions
from nbparallel.wire.messages import DESCRIPTORS_CLOSED, Configure
from nbparallel.wire.system import JOBLIB, ready

prepared_shell: shells.RankShell | None = None


def prepare() -> None:
    """Create the shell and import what every rank needs; the template calls this once, before any fork."""
    global prepared_shell
    import cloudpickle  # noqa: F401  imported here so that no rank has to
    import IPython.core.logger  # noqa: F401
    import numpy.random  # noqa: F401

    from nbparallel import distributed  # noqa: F401
    from nbparallel.distributed import communicator, tracing
    from nbparallel.engine import environment

    environment.find_blas()
    JOBLIB.install()
    tracing.inspect_parameters(getattr(communicator.Communicator, name) for name in communicator.TRACED)
    prepared_shell = shells.make()
    prepared_shell.transform_cell("pass")  # compiles Python's and IPython's regular expressions


def spawned(channel: int, segments: int, client: int, supervisor: int) -> NoReturn:
    """Enter a rank that was started as a fresh interpreter (``start_method="spawn"``)."""
    die_with_parent(supervisor)
    for fd in (channel, segments):
        os.set_inheritable(fd, False)
    prepare()
    _run(channel, segments, client)


def serve(channel: int, stdout: int, stderr: int, segments: int, *, client: int) -> NoReturn:
    """Enter a rank that was forked from the template."""
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(stdout, 1)
    os.dup2(stderr, 2)
    for fd in (null, stdout, stderr):
        os.close(fd)
    _run(channel, segments, client)


def _run(channel_fd: int, segments_fd: int, client: int) -> NoReturn:
    code = 1
    sockets = {fd: os.fstat(fd).st_ino for fd in (channel_fd, segments_fd)}
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # until the engine's own handler is there
        faulthandler.enable(file=2)
        _prefer_for_oom_kill()
        channel, segments = Channel.from_fd(channel_fd), Channel.from_fd(segments_fd)
        _announce(segments)
        configure = _configure(channel)
        process_names.join_session(configure.notebook)
        broker = SegmentClient(segments, client=client)
        store = sharing.Store(client)
        store.connect(broker)
        sharing.set_current_store(store)
        assert prepared_shell is not None
        engine = Engine(channel, broker, configure, prepared_shell)
        _fault("boot", configure.rank)
        channel.send(Kind.RANK_READY, pack_versions())
        _loop(channel, engine)
        code = 0
    except ChannelClosedError:
        code = 0  # the kernel is gone; the supervisor ends this rank anyway
    finally:
        # a rank leaves by _exit only: exit handlers belong to the template or to the user's libraries
        try:
            if _closed(sockets):
                code = DESCRIPTORS_CLOSED
            elif code:
                sys.excepthook(*sys.exc_info())
            sys.stdout.flush()
            sys.stderr.flush()
            _remove_folder()
        finally:
            os._exit(code)


def _remove_folder() -> None:
    """Remove the temporary folder that multiprocessing, if used, has made for sockets: its last step."""
    library = sys.modules.get("multiprocessing.process")
    folder = None if library is None else library.current_process()._config.get("tempdir")
    if folder:
        import shutil

        shutil.rmtree(folder, ignore_errors=True)


def _closed(sockets: dict[int, int]) -> bool:
    """Whether user code has closed a socket of the rank; another file may have its number."""
    for fd, inode in sockets.items():
        try:
            if os.fstat(fd).st_ino != inode:
                return True
        except OSError:
            return True
    return False


def _announce(segments: Channel) -> None:
    segments.send(Kind.ANNOUNCE, pack_pid(os.getpid()))


def _configure(channel: Channel) -> Configure:
    select.select([channel], [], [])
    frame = channel.receive()
    assert frame is not None
    assert frame.kind is Kind.CONFIGURE
    configure = pickle.loads(frame.payload)
    assert isinstance(configure, Configure)
    return configure


def _loop(channel: Channel, engine: Engine) -> None:
    poll = select.poll()
    poll.register(channel, select.POLLIN)
    segments = engine.state.broker.fileno()
    poll.register(segments, select.POLLIN)
    deferred = engine.input_requests.deferred
    due: float | None = None  # without a time-out an idle rank uses no CPU; its end comes by signal
    while True:
        if not deferred:
            for fd, events in ready(poll, due):
                if fd == segments and events & select.POLLHUP:
                    poll.unregister(fd)  # the supervisor is gone, and this rank is about to be killed
                elif fd == segments:
                    engine.reclaim_memory()  # another process released memory that this rank allocated
        frame = deferred.popleft() if deferred else channel.receive_nowait()
        if frame is not None:
            try:
                if frame.kind is Kind.EXIT:
                    return
                engine.handle(frame)
            finally:
                frame.close()
        due = engine.release_idle_memory()


def _prefer_for_oom_kill() -> None:
    """Make the out-of-memory killer prefer a rank to the notebook (proc(5), oom_score_adj)."""
    try:
        with open("/proc/self/oom_score_adj", "w") as file:
            file.write("500")
    except OSError:
        pass  # not Linux, or not allowed: then the system decides


def _fault(point: str, rank: int) -> None:
    """Die here if a test asked for it: ``NBP_FAULT=boot:RANK:0:kill``."""
    wanted = os.environ.get("NBP_FAULT", "").split(":")
    if wanted[:2] == [point, str(rank)] and wanted[-1] == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
