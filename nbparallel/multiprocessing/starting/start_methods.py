"""How each start method begins a process.

``forkserver``: a server of our own, which has this package loaded, forks each process.

The library's server stays as it is.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
from collections.abc import Sequence
from multiprocessing import (
    forkserver,
    popen_fork,
    popen_forkserver,
    popen_spawn_posix,
    resource_tracker,
    spawn,
    util,
)
from typing import Any

from nbparallel.errors import StartError
from nbparallel.multiprocessing.messages.parcels import join_household, mark_forked, unchanging_globals
from nbparallel.multiprocessing.starting.process_state import (
    NEEDED,
    default_context,
    interrupts_blocked,
    pickle_process,
)
from nbparallel.wire.system import without_debugger

_nothing = contextlib.nullcontext()

# Start method ``spawn``: a fresh interpreter that runs nothing of ``__main__``.

_FOLLOW = (
    "import fcntl, os, select, struct; p = select.poll(); p.register({0}, 0); "
    "fcntl.fcntl({0}, 15, struct.pack('ii', 1, os.getpid())); p.poll(0) and os._exit(1)"
)
"""`ParentSentinel.follow` before anything is imported, which takes seconds on busy cores: it may end then."""


class SpawnPopen(popen_spawn_posix.Popen):
    """A process in a fresh interpreter."""

    _fds: list[int]
    guest_ends: Any = None
    """What it is given to be a guest, if it can be one; set by its pickling, and closed here."""

    def duplicate_for_child(self, fd: int) -> int:
        """Have a descriptor passed on; an object that is pickled twice has two of them there."""
        if fd in self._fds:
            fd = os.dup(fd)
            self._given.callback(os.close, fd)
        self._fds.append(fd)
        return fd

    def _launch(self, process_obj: Any) -> None:  # the library's, with other preparation data
        blocked = interrupts_blocked() if process_obj.defers_sigint else _nothing
        # nested blocks without a debugger would end at the first one's end
        with contextlib.ExitStack() as self._given, without_debugger():
            self._given.callback(lambda: self.guest_ends and self.guest_ends.close())
            tracker_fd: Any = resource_tracker.getfd()
            self._fds.append(tracker_fd)
            buffer = pickle_process(self, process_obj)
            ends: list[int] = []
            self.finalizer = util.Finalize(self, lambda: util.close_fds(*ends))  # type: ignore[attr-defined]
            self.sentinel, child_w = os.pipe()
            self._given.callback(os.close, child_w)
            ends.append(self.sentinel)
            child_r, parent_w = os.pipe()
            ends.append(parent_w)
            command = spawn.get_command_line(tracker_fd=tracker_fd, pipe_handle=child_r)
            if self.guest_ends is not None and self.guest_ends.lifeline is not None:
                command[command.index("-c") + 1] = "; ".join(
                    (_FOLLOW.format(self.guest_ends.lifeline.reading), command[command.index("-c") + 1])
                )
            self._fds.extend([child_r, child_w])
            try:
                with blocked:
                    self.pid = util.spawnv_passfds(spawn.get_executable(), command, self._fds)  # type: ignore[arg-type]
            finally:
                os.close(child_r)  # else what does not fit into the pipe waits for a child that is gone
            try:
                with open(parent_w, "wb", closefd=False) as file:
                    file.write(buffer.getbuffer())
            except BrokenPipeError as error:
                raise StartError(
                    f"{spawn.get_executable()!r}, process {self.pid}, ended before it had read what "
                    f"{process_obj.name} is to do"
                ) from error


# Start method ``fork``: the child holds the arrays that it inherits.


@functools.cache
def _load_needed() -> None:
    # Another thread may be about to load it for a message; a child that is forked in between could never.
    for name in NEEDED:
        importlib.import_module(name)


class _Child:
    """What the library's launch calls in the child, which takes its part before it does the work."""

    def __init__(self, process: Any, fork: Any) -> None:
        self._process, self._fork, self._inherited = process, fork, unchanging_globals()
        self._force_start_method = default_context().force_start_method

    def _bootstrap(self, parent_sentinel: int) -> int:
        if self._fork is not None:
            self._fork.child()
            mark_forked(self._inherited)
        if self._process._start_method is not None:
            self._force_start_method(self._process._start_method)
        code: int = self._process._bootstrap(parent_sentinel)
        return code


class ForkPopen(popen_fork.Popen):
    """A process that is forked from this one."""

    pid: Any = None  # known once it was forked

    def _launch(self, process_obj: Any) -> None:
        _load_needed()
        fork: Any = None
        if (member := join_household()) is not None:  # else this process takes no part
            fork = member.fork(daemon=process_obj.daemon or process_obj.ends_with_parent)
        try:
            with interrupts_blocked() if process_obj.defers_sigint else _nothing:
                super()._launch(_Child(process_obj, fork))  # type: ignore[misc]  # typeshed has it in Popen
        finally:
            if fork is not None:
                fork.parent()


PRELOADED = ("nbparallel.multiprocessing.pool", "multiprocessing.popen_forkserver", *NEEDED)
"""What the server has loaded before it forks: all that a process, or a first array in one, would load."""


class PackageForkServer(forkserver.ForkServer):
    """A fork server that has this package loaded."""

    def __init__(self) -> None:
        super().__init__()
        self._owner = os.getpid()
        self._preload_modules = list(PRELOADED)

    def set_forkserver_preload(self, modules_names: Sequence[str], **options: Any) -> None:
        """Set what else the server loads; ``__main__`` is never run again."""
        super().set_forkserver_preload(list(modules_names), **options)
        self._preload_modules = [*PRELOADED, *(name for name in modules_names if name != "__main__")]

    def ensure_running(self) -> None:
        """Start the server if this process has none."""
        if self._owner != os.getpid():  # a forked child cannot wait for its parent's server
            preload = self._preload_modules
            self.__init__()  # type: ignore[misc]
            self._preload_modules = preload
        with without_debugger():
            resource_tracker.ensure_running()  # which would unblock it
        with (
            interrupts_blocked(),
            without_debugger(),
        ):  # it has the handler of Python while it loads, and its children begin so
            super().ensure_running()


present_server = PackageForkServer()
"""The server of this process."""
_forkserver = present_server  # the library's name of its own, by which its tests find it


class ForkServerPopen(popen_forkserver.Popen):
    """A process that our server forks."""

    _fds: list[int]
    guest_ends: Any = None
    """What it is given to be a guest, if it can be one; set by its pickling, and closed here."""

    def _launch(self, process_obj: Any) -> None:  # the library's, with other data and another server
        server = None
        try:
            buffer = pickle_process(self, process_obj)
            present_server.ensure_running()
            server = present_server._forkserver_pid  # type: ignore[attr-defined]
            self.sentinel, w = present_server.connect_to_new_process(self._fds)
        except (EOFError, ConnectionError) as error:
            if server is None:
                raise  # of what the process is given
            raise _ended(server, process_obj.name) from error
        finally:
            if self.guest_ends is not None:
                self.guest_ends.close()
        # the child sees by it that this process is alive
        parent_w = os.dup(w)
        ends = (parent_w, self.sentinel)
        self.finalizer = util.Finalize(self, util.close_fds, ends)  # type: ignore[attr-defined]
        try:
            with open(w, "wb", closefd=True) as file, buffer.getbuffer() as view:
                file.write(view)
            self.pid = forkserver.read_signed(self.sentinel)
        except (EOFError, ConnectionError) as error:
            raise _ended(server, process_obj.name) from error


POPENS = {"fork": ForkPopen, "spawn": SpawnPopen, "forkserver": ForkServerPopen}
"""Start method -> what starts a process so."""


def _ended(server: int, name: str) -> StartError:
    return StartError(
        f"the fork server, process {server}, ended while it started {name}: by hand, or by the system "
        "because memory ran out; the next start makes another server"
    )
