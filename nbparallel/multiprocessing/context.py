"""Contexts: the library's, whose pipes, queues, pools, managers and processes are ours.

Everything else in here is the library's ``multiprocessing.context``.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from multiprocessing import context as library
from typing import Any, ClassVar

from nbparallel.multiprocessing.starting.process_state import (
    ValueProcess,
    concrete_context,
    set_default_context,
)


class ContextProcess(ValueProcess):
    """A process that starts as its context says."""

    @staticmethod
    def _Popen(process_obj: Any) -> Any:  # noqa: N802
        from nbparallel.multiprocessing.starting.start_methods import POPENS

        return POPENS[process_obj._start_method or concrete_context()._name](process_obj)


class DefaultProcess(ContextProcess, library.Process):
    """A process that starts as the default context says."""


DefaultProcess.__name__ = DefaultProcess.__qualname__ = "Process"
Process = DefaultProcess


class ForkProcess(ContextProcess, library.ForkProcess):
    """A process that is forked from its parent."""


class SpawnProcess(ContextProcess, library.SpawnProcess):
    """A process in a fresh interpreter."""


class ForkServerProcess(ContextProcess, library.ForkServerProcess):
    """A process that our fork server forks."""


class _Factory(library.BaseContext):
    """What makes something of ours."""

    def Manager(self) -> Any:  # noqa: N802
        """Return a manager whose process has started."""
        from nbparallel.multiprocessing.managers import SyncManager

        manager = SyncManager(ctx=self.get_context())
        manager.start()
        return manager

    def Pipe(self, duplex: bool = True) -> Any:  # noqa: N802
        """Return the two ends of a pipe."""
        from nbparallel.multiprocessing.connection import Pipe

        return Pipe(duplex)

    def Queue(self, maxsize: int = 0) -> Any:  # noqa: N802
        """Return a queue."""
        from nbparallel.multiprocessing.queues import Queue

        return Queue(maxsize, ctx=self.get_context())

    def JoinableQueue(self, maxsize: int = 0) -> Any:  # noqa: N802
        """Return a queue that can be waited for."""
        from nbparallel.multiprocessing.queues import JoinableQueue

        return JoinableQueue(maxsize, ctx=self.get_context())

    def SimpleQueue(self) -> Any:  # noqa: N802
        """Return a queue without a thread."""
        from nbparallel.multiprocessing.queues import SimpleQueue

        return SimpleQueue(ctx=self.get_context())

    def Pool(  # noqa: N802
        self,
        processes: int | None = None,
        initializer: Any = None,
        initargs: Any = (),
        maxtasksperchild: int | None = None,
    ) -> Any:
        """Return a pool of processes."""
        from nbparallel.multiprocessing.pool import Pool

        return Pool(processes, initializer, initargs, maxtasksperchild, context=self.get_context())

    def set_forkserver_preload(self, module_names: Sequence[str], **options: Any) -> None:
        """Set what our fork server loads before it forks, besides this package."""
        from nbparallel.multiprocessing.starting.start_methods import present_server

        present_server.set_forkserver_preload(list(module_names), **options)  # since 3.15: on_error

    def get_context(self, method: str | None = None) -> Any:
        """Return the context of a start method."""
        if method is None:
            from nbparallel.multiprocessing.household.semaphore_names import name_semaphores

            name_semaphores()  # whatever makes a lock asks for the context
            return self
        if method not in _concrete_contexts:
            known = ", ".join(_concrete_contexts)
            raise ValueError(f"cannot find context for {method!r}; the start methods are {known}")
        return _concrete_contexts[method]


class ForkContext(_Factory, library.ForkContext):
    """Start method ``fork``."""

    Process = ForkProcess


class SpawnContext(_Factory, library.SpawnContext):
    """Start method ``spawn``."""

    Process = SpawnProcess


class ForkServerContext(_Factory, library.ForkServerContext):
    """Start method ``forkserver``."""

    Process = ForkServerProcess


class DefaultContext(_Factory, library.DefaultContext):
    """The start method that is used where none is named: set at most once, else decided on first use."""

    Process: ClassVar[type[DefaultProcess]] = DefaultProcess

    _actual_context: Any

    def __init__(self) -> None:
        super().__init__(library._default_context._default_context)  # type: ignore[attr-defined]

    def get_context(self, method: str | None = None) -> Any:
        """Return the context of a start method, by default of the one that is used."""
        if method is not None:
            return super().get_context(method)
        if self._actual_context is None:
            self._actual_context = _concrete_contexts[_usual_method()]
        return self._actual_context.get_context()

    def set_start_method(self, method: str | None, force: bool = False) -> None:
        """Set the start method, here and as the library's default: their locks do not mix.

        Raises
        ------
        RuntimeError
            Another one has been set or used before, and `force` is false.
        """
        present = self._actual_context
        if present is not None and not force and present._name != method:  # a cell may be run again
            raise RuntimeError(
                f"context has already been set: the start method is {present._name!r}, because it was chosen "
                f"before, or a process, queue or lock was made; set_start_method({method!r}, force=True) "
                f"changes it for those that you make from now on, get_context({method!r}).Pool for one pool"
            )
        actual = None if method is None and force else self.get_context(method)
        library._default_context.set_start_method(method, force=True)
        self._actual_context = actual

    def get_all_start_methods(self) -> list[str]:
        """Return the start methods of this system, the library's usual one first."""
        return super().get_all_start_methods()

    def get_start_method(self, allow_none: bool = False) -> Any:
        """Return the start method that is used; with `allow_none` None if that is not decided."""
        if self._actual_context is None and allow_none:
            return None
        name: str = self.get_context()._name
        return name

    def present_start_method(self) -> str:
        """Return the start method that would be used now, without deciding it."""
        return _usual_method() if self._actual_context is None else self._actual_context._name

    def force_start_method(self, method: str) -> None:
        """Use what a new process was started with."""
        self._actual_context = _concrete_contexts[method]


_concrete_contexts: dict[str, Any] = {
    "fork": ForkContext(),
    "spawn": SpawnContext(),
    "forkserver": ForkServerContext(),
}


def _usual_method() -> str:
    """Return forkserver in a notebook, whose kernel has threads that no fork copies, else the library's."""
    shell = sys.modules.get("IPython")
    get_ipython = getattr(shell, "get_ipython", None)
    if get_ipython is not None and get_ipython() is not None:
        return "forkserver"
    name: str = library._default_context._default_context._name  # type: ignore[attr-defined]
    return name


_default_context = DefaultContext()
set_default_context(_default_context)


def __getattr__(name: str) -> Any:
    return getattr(library, name)
