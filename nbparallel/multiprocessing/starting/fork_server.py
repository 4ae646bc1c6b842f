"""Start method ``forkserver``: a server of our own, which has this package loaded, forks each process.

The library's server stays as it is.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from multiprocessing import forkserver, popen_forkserver, resource_tracker, util
from typing import Any

from nbparallel.errors import StartError
from nbparallel.multiprocessing.starting.interrupts import interrupts_blocked
from nbparallel.multiprocessing.starting.process_state import NEEDED, pickle_process
from nbparallel.wire.system import without_debugger

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
    starting: Any = None
    """The process, while it is pickled."""
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


def _ended(server: int, name: str) -> StartError:
    return StartError(
        f"the fork server, process {server}, ended while it started {name}: by hand, or by the system "
        "because memory ran out; the next start makes another server"
    )
