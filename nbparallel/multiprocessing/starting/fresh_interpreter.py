"""Start method ``spawn``: a fresh interpreter that runs nothing of ``__main__``."""

from __future__ import annotations

import os
from multiprocessing import popen_spawn_posix, resource_tracker, spawn, util
from typing import Any

from nbparallel.errors import StartError
from nbparallel.multiprocessing.starting.interrupts import interrupts_blocked
from nbparallel.multiprocessing.starting.process_state import pickle_process
from nbparallel.wire.system import without_debugger

_FOLLOW = (
    "import fcntl, os, select, struct; p = select.poll(); p.register({0}, 0); "
    "fcntl.fcntl({0}, 15, struct.pack('ii', 1, os.getpid())); p.poll(0) and os._exit(1)"
)
"""`ParentSentinel.follow` before anything is imported, which takes seconds on busy cores: it may end then."""


class SpawnPopen(popen_spawn_posix.Popen):
    """A process in a fresh interpreter."""

    _fds: list[int]
    starting: Any = None
    """The process, while it is pickled."""
    guest_ends: Any = None
    """What it is given to be a guest, if it can be one; set by its pickling, and closed here."""

    def duplicate_for_child(self, fd: int) -> int:
        """Have a descriptor passed on; an object that is pickled twice has two of them there."""
        if fd in self._fds:
            fd = os.dup(fd)
            self._copies.append(fd)
        self._fds.append(fd)
        return fd

    def _launch(self, process_obj: Any) -> None:  # the library's, with other preparation data
        self._copies: list[int] = []
        try:
            with without_debugger():  # nested blocks would end at the first one's end
                tracker_fd: Any = resource_tracker.getfd()
                self._fds.append(tracker_fd)
                self._start(process_obj, tracker_fd)
        finally:
            for copy in self._copies:
                os.close(copy)
            if self.guest_ends is not None:
                self.guest_ends.close()

    def _start(self, process_obj: Any, tracker_fd: int) -> None:
        buffer = pickle_process(self, process_obj)
        parent_r = child_w = child_r = parent_w = None
        try:
            parent_r, child_w = os.pipe()
            child_r, parent_w = os.pipe()
            command = spawn.get_command_line(tracker_fd=tracker_fd, pipe_handle=child_r)
            if self.guest_ends is not None and self.guest_ends.lifeline is not None:
                command[command.index("-c") + 1] = "; ".join(
                    (_FOLLOW.format(self.guest_ends.lifeline.fileno()), command[command.index("-c") + 1])
                )
            self._fds.extend([child_r, child_w])
            with interrupts_blocked(late=process_obj.defers_sigint):
                self.pid = util.spawnv_passfds(spawn.get_executable(), command, self._fds)  # type: ignore[arg-type]
            self.sentinel = parent_r
            os.close(child_r)  # else what does not fit into the pipe waits for a child that is gone
            child_r = None
            with open(parent_w, "wb", closefd=False) as file, buffer.getbuffer() as view:
                file.write(view)
        except BrokenPipeError as error:
            raise StartError(
                f"{spawn.get_executable()!r}, process {self.pid}, ended before it had read what "
                f"{process_obj.name} is to do"
            ) from error
        finally:
            ends = [end for end in (parent_r, parent_w) if end is not None]
            self.finalizer = util.Finalize(self, util.close_fds, ends)  # type: ignore[attr-defined]
            for end in (child_r, child_w):
                if end is not None:
                    os.close(end)
