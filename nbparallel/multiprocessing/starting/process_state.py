"""What a process is given: itself, by value where ``__main__`` defines it.  Nothing is run again."""

from __future__ import annotations

import io
import os
import pickle
import signal
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from multiprocessing import context, process as library, reduction, spawn
from multiprocessing.context import BaseContext, set_spawning_popen
from multiprocessing.reduction import DupFd
from multiprocessing.util import Finalize
from types import MappingProxyType
from typing import Any, TypeVar

from nbparallel.multiprocessing.messages.parcels import (
    ReducedCall,
    join_household,
    mark_fresh,
    open_parcel,
    pack,
    try_pickle,
)

# Interrupts that come at a bad moment: while a worker starts, or just before a system call that waits.
#
# A terminal's Ctrl-C reaches every process of the group, and one that starts has the handler of Python, which
# would end it with a traceback.  A signal that is blocked waits: `begin_interrupts` delivers it.
#
# Python runs the handler of a signal between two instructions.  One that comes after the last such check and
# before the call sleeps sets a flag that is read when the call ends: the stop button is pressed, and
# nothing happens.  The thread may stay there for long, where it gives the lock of the interpreter to another
# thread first.  So no wait of the main thread is one long call.

_INTERRUPT = {signal.SIGINT}
_Target = TypeVar("_Target", bound=Callable[..., Any])


def defers_sigint(target: _Target) -> _Target:
    """Mark a target that calls `begin_interrupts` itself: in its process SIGINT is blocked until then."""
    vars(target)["defers_sigint"] = True
    return target


@contextmanager
def interrupts_blocked() -> Iterator[None]:
    """Block SIGINT in this thread: a process that it starts begins so."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _INTERRUPT)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def begin_interrupts() -> None:
    """Take interrupts from now on, one that came before included."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _INTERRUPT)


SLICE_SECONDS = 0.2
"""How late an interrupt can be that came at the wrong moment; arbitrary."""


def wait_interruptibly(wait: Callable[[float | None], object], timeout: float | None = None) -> bool:
    """Return what `wait` does, which is called with a number of seconds until it returns true.

    Parameters
    ----------
    wait : callable
        Waits at most as many seconds as it is given, None: as long as it takes.
    timeout : float, optional
        Seconds after which the last call's False is returned.
    """
    if threading.current_thread() is not threading.main_thread():
        return bool(wait(timeout))
    deadline = None if timeout is None else time.monotonic() + timeout
    while True:
        left = SLICE_SECONDS if deadline is None else max(0.0, deadline - time.monotonic())
        if wait(min(left, SLICE_SECONDS)):
            return True
        if deadline is not None and left <= SLICE_SECONDS:
            return False


_current: dict[str, Any] = {}


def default_context() -> Any:
    """Return the default context of this package."""
    return _current["context"]


def set_default_context(context: BaseContext) -> None:
    """Make `context` the default; `context.py` does so when it is imported."""
    _current["context"] = context


def concrete_context() -> Any:
    """Return the context of one start method that is used now."""
    return _current["context"].get_context()


NEEDED = (
    "nbparallel.multiprocessing.household", "nbparallel.sharing",
    "nbparallel.transfer.pickling", "nbparallel.multiprocessing.starting.worker_threads",
)  # fmt: skip
"""Modules that the first array on its way loads, and what gives a worker its threads."""
_CONTEXTS = "nbparallel.multiprocessing.context"
"""Where the classes of processes are whose state is what the library gives them."""


def argument_tuple(args: Any) -> tuple[Any, ...]:
    """Return arguments as a tuple.

    Raises
    ------
    TypeError
        They are just one, most often because a comma was forgotten.
    """
    if not isinstance(args, Iterable):
        kind = type(args).__name__
        raise TypeError(f"args must be a tuple, not {kind}: one argument is args=(x,), with a comma")
    return tuple(args)


class ValueProcess(library.BaseProcess):
    """A process of the library that travels by value and may have children even if it is daemonic."""

    ends_with_parent: bool = False
    """Whether it ends with its parent, however that ends, as daemonic ones do; to be set before the start."""

    def __init__(
        self,
        group: None = None,
        target: Callable[..., Any] | None = None,
        name: str | None = None,
        args: Iterable[Any] = (),
        kwargs: Mapping[str, Any] = MappingProxyType({}),
        *,
        daemon: bool | None = None,
    ) -> None:
        super().__init__(group, target, name, argument_tuple(args), kwargs, daemon=daemon)
        self.defers_sigint: bool = getattr(target, "defers_sigint", False)

    def start(self) -> None:
        """Start the process.

        Raises
        ------
        UnpicklableError
            Its target or an argument cannot be sent (never with fork).
        """
        # The library refuses daemonic parents, because their children would outlive them.
        config: dict[str, Any] = library.current_process()._config  # type: ignore[attr-defined]
        daemonic = config.pop("daemon", None)
        try:
            super().start()
        finally:
            if daemonic is not None:
                config["daemon"] = daemonic

    def join(self, timeout: float | None = None) -> None:
        """Wait until the process ends, at most `timeout` seconds."""
        if self._popen is not None and self._parent_pid == os.getpid():  # type: ignore[attr-defined]
            timeout = None if wait_interruptibly(self._ended_within, timeout) else 0
        super().join(timeout)
        if (ended := _watchers.get(self)) is not None and self.exitcode is not None:
            del _watchers[self]
            ended(self)

    def _bootstrap(self, parent_sentinel: Any = None) -> int:
        vars(self)["run"] = partial(run_with_cells_named, self.name, self.run)
        code: int = super()._bootstrap(parent_sentinel)  # type: ignore[misc]  # typeshed leaves it out
        return code

    def _ended_within(self, seconds: float | None) -> bool:
        from nbparallel.wire.system import is_ready  # which the import of this package leaves out

        popen: Any = self._popen  # type: ignore[attr-defined]
        # A process that it forked may hold the sentinel, but then it has ended nevertheless.
        return popen.returncode is not None or is_ready(popen.sentinel, seconds) or popen.poll() is not None


def run_with_cells_named(name: str, run: Callable[[], None]) -> None:
    """Write the traceback of a process that fails in a notebook's cell: the library names files only."""
    # executors end before this process waits for its children
    Finalize(None, _end_executors, exitpriority=BEFORE_CHILDREN)
    try:
        run()
    except SystemExit:
        raise
    except BaseException as error:
        from nbparallel.transfer.cell_sources import name_cells

        trace = error.__traceback__
        error.__traceback__ = None if trace is None else trace.tb_next  # without this function
        files = traceback.format_exc()
        if (cells := name_cells(files)) == files:
            raise
        sys.stderr.write(f"Process {name}:\n{cells}")
        sys.exit(1)


BEFORE_CHILDREN = 100
"""Order of what multiprocessing does when a process ends: 0 and more come before it waits for children."""


def _end_executors() -> None:
    """End what has threads that end its own processes: executors of ours, the library's and joblib's.

    A program does that first when it ends, but a process of multiprocessing waits for its children before.
    """
    for end in reversed(getattr(threading, "_threading_atexits", ())):
        end()


_watchers: weakref.WeakKeyDictionary[Any, Callable[[Any], None]] = weakref.WeakKeyDictionary()


def watch_end(process: ValueProcess, ended: Callable[[Any], None]) -> None:
    """Call `ended` in the thread that joins the process after its end."""
    _watchers[process] = ended


def present_strategy() -> str | None:
    """Return the sharing strategy, without loading what knows it; None: nothing has used it."""
    sharing = sys.modules.get("nbparallel.sharing")
    return None if sharing is None else sharing.get_sharing_strategy()


def follow_strategy(name: str | None) -> None:
    """Use another process's sharing strategy, unless that has none."""
    if name and name != present_strategy():
        from nbparallel.sharing import set_sharing_strategy

        set_sharing_strategy(name)


def open_plain_process(data: bytes) -> Any:
    """Rebuild a process all of which every process can import."""
    cls, state = pickle.loads(data)
    process = cls.__new__(cls)
    vars(process).update(state)
    return process


def rebuild_process(
    start_method: str,
    strategy: str | None,
    connection: Any,
    lifeline: Any,
    interrupts: bool,
    open_process: Callable[..., Any],
    *packed: Any,
) -> Any:
    """Join the parent's household in the new process, and return the process object.

    Parameters
    ----------
    connection, lifeline : DupFd or None
        To the supervisor, and what ends it with the root.
    interrupts : bool
        Whether it takes interrupts from its start; a fork server's child begins with SIGINT blocked.
    """
    main = vars(sys.modules["__main__"])
    for name in ("main", "spawn_main"):  # of the library's command line
        if getattr(main.get(name), "__module__", "").startswith("multiprocessing."):
            del main[name]
    if interrupts:
        begin_interrupts()
    mark_fresh()
    default_context().force_start_method(start_method)
    if connection is not None:
        from nbparallel.multiprocessing import household

        line = -1 if lifeline is None else lifeline.detach()
        household.begin_as_guest(connection.detach(), lifeline=line)
    follow_strategy(strategy)
    process = open_process(*packed)
    if process._start_method is not None:
        default_context().force_start_method(process._start_method)
    return process


def preparation_data(name: str) -> Mapping[str, Any]:
    """Return what the library sends a new interpreter, but nothing of ``__main__``."""
    usual: Any = context._default_context
    decided = usual._actual_context
    data = spawn.get_preparation_data(name)
    usual._actual_context = decided  # asking for it decides it, but the library's default is the user's
    data["start_method"] = default_context().present_start_method()
    return {key: value for key, value in data.items() if not key.startswith("init_main")}


def pickle_process(popen: Any, process: Any) -> io.BytesIO:
    """Return what a new interpreter or a fork server is sent: the library's preparation, and the process.

    The other ends of what it is given as a guest are ``popen.guest_ends`` afterwards.
    """
    buffer = io.BytesIO()
    set_spawning_popen(popen)
    try:
        reduction.dump(preparation_data(process._name), buffer)
        packed = _packed(process)
        if (ends := join_household()) is not None:
            ends = popen.guest_ends = ends.introduce(daemon=process.daemon or process.ends_with_parent)
        rebuilt = ReducedCall(
            rebuild_process,
            default_context().present_start_method(),
            present_strategy(),
            None if ends is None else DupFd(ends.connection.fileno()),
            None if ends is None or ends.lifeline is None else DupFd(ends.lifeline.reading),
            not process.defers_sigint,
            *packed,
        )
        reduction.dump(rebuilt, buffer)
    finally:
        set_spawning_popen(None)
    return buffer


def _packed(process: Any) -> tuple[Any, ...]:
    """Return what rebuilds a process there: a function and its arguments."""
    if type(process).__module__ == _CONTEXTS:  # a class of the user's may have its own way of being pickled
        light = try_pickle((type(process), vars(process)))
        if light is not None:
            return open_plain_process, bytes(light)
    return open_parcel, *pack(process, task=True)
