"""Process group: one process of a script as a rank of a world, from joining it to leaving it.

For the operations the whole script is one cell: after a failure no operation is possible until the process
has left the world and joined another one.
"""

from __future__ import annotations

import atexit
import contextlib
import datetime
import os
import platform
import socket
import sys
import tempfile
from collections.abc import Callable, Mapping
from types import FrameType, TracebackType
from typing import Any, NamedTuple
from urllib.parse import unquote, urlsplit

import numpy as np

from nbparallel import sharing
from nbparallel.channel.channel import SegmentClient
from nbparallel.distributed.bootstrap.rendezvous import Admission, arrive_and_wait, meet_at_supervisor
from nbparallel.distributed.communicator import Communicator
from nbparallel.distributed.runtime.supervisor_liveness import SupervisorLiveness
from nbparallel.errors import ChannelClosedError, ForkedRankError, SupervisorDiedError
from nbparallel.sharing import Store
from nbparallel.wire.control_layout import MAX_WORLD_SIZE
from nbparallel.wire.frames import Kind
from nbparallel.wire.identity import Join, client_of
from nbparallel.wire.segments import FIRST_INTRODUCED, LeaveWorld

# Checks the arguments of `init_process_group`: rank, world size, the directory of the rendezvous.

BACKENDS = frozenset({"nbparallel", "gloo", "mpi", "nccl"})
"""There is one; the others' names are accepted so that scripts for torch run."""
DEFAULT_SECONDS = 300.0
"""How long a process waits for the others, in seconds; arbitrary."""
MOST_SECONDS = 1e6
LAUNCHERS = (
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),
    ("SLURM_PROCID", "SLURM_NTASKS"),
)
"""Variables of launchers that do not set RANK and WORLD_SIZE."""
EXAMPLE = (
    "RANK=0 (1, 2, …: one for each process), WORLD_SIZE=4 and MASTER_PORT=29500, as torchrun does, or use "
    "`python -m nbparallel run` (in a notebook %%parallel), which needs none of them"
)


class InitMethod(NamedTuple):
    """Rank, world size and meeting directory of one process."""

    place: str
    """The directory in which the processes meet; it exists only until the group is formed."""
    rank: int
    """This process's number."""
    world_size: int
    """How many there will be."""


def resolve_init_method(
    init_method: str | None, rank: Any, world_size: Any, environment: Mapping[str, str]
) -> InitMethod:
    """Return what the arguments and, for what they leave out, the environment say.

    Raises
    ------
    ValueError, TypeError
        Something is missing or makes no sense; the message names it.
    """
    method = "env://" if init_method is None else init_method
    if not isinstance(method, str):
        raise TypeError(f"init_method must be a string, not {type(method).__name__}")
    size = _number("world_size", world_size, environment)
    place = _place(method, environment)
    number = _number("rank", rank, environment)
    if not 1 <= size <= MAX_WORLD_SIZE:
        raise ValueError(f"world_size (WORLD_SIZE) must be between 1 and {MAX_WORLD_SIZE}, not {size}")
    if not 0 <= number < size:
        raise ValueError(
            f"rank (RANK) is {number}, and a world of world_size={size} has the ranks 0-{size - 1}"
        )
    return InitMethod(place, number, size)


def check_backend(backend: object) -> None:
    """Raise if the backend is unknown."""
    if backend is not None and not (isinstance(backend, str) and backend.lower() in BACKENDS):
        raise ValueError(
            f"unknown backend {backend!r}: leave it out, there is only one ('gloo', 'mpi' and 'nccl' are "
            "taken for it, so that scripts for torch run)"
        )


def seconds_of(timeout: float | datetime.timedelta | None) -> float:
    """Return a time-out in seconds."""
    if isinstance(timeout, datetime.timedelta):
        timeout = timeout.total_seconds()
    if timeout is None:
        return DEFAULT_SECONDS
    if isinstance(timeout, bool) or not isinstance(timeout, int | float):
        raise TypeError(f"timeout must be seconds or a timedelta, not {type(timeout).__name__} {timeout!r}")
    if not 0 < timeout <= MOST_SECONDS:
        raise ValueError(f"timeout must be more than 0 s and at most {MOST_SECONDS:g} s, not {timeout:g}")
    return float(timeout)


def _number(name: str, value: Any, environment: Mapping[str, str]) -> int:
    if value is not None and (isinstance(value, bool) or not hasattr(value, "__index__")):
        raise TypeError(f"{name} must be an int, not {type(value).__name__} {value!r}")
    if value is not None and value.__index__() != -1:  # torch's "not given"
        return int(value.__index__())
    variable = name.upper()
    text = environment.get(variable, "").strip()
    if not text:
        hint = _hint(name, environment)
        raise ValueError(
            f"the environment variable {variable} is not set, and {name}= was not passed{hint}: start every "
            f"process with {EXAMPLE}"
        )
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"the environment variable {variable} must be an integer, not {text!r}") from None


def _hint(name: str, environment: Mapping[str, str]) -> str:
    for rank, size in LAUNCHERS:
        variable = rank if name == "rank" else size
        if variable in environment:
            return f" (this launcher sets another variable: {name}=int(os.environ[{variable!r}]))"
    return ""


def _place(method: str, environment: Mapping[str, str]) -> str:
    parts = urlsplit(method)
    if parts.scheme == "file":
        return _path(method, parts.netloc, unquote(parts.path))
    if parts.scheme == "env" and not parts.netloc and not parts.path:
        _check_address(environment.get("MASTER_ADDR", "").strip())
        port = _port(environment.get("MASTER_PORT", "").strip())
        # The address is always this machine's, however it is spelled; another user has another directory.
        return os.path.join(tempfile.gettempdir(), f"nbparallel-{os.geteuid()}-{port}")
    raise ValueError(
        f"init_method {method!r} is not known: use 'env://' (ranks with one MASTER_PORT meet) or "
        "'file:///path/of/a/file/that/does/not/exist'"
    )


def _path(method: str, netloc: str, path: str) -> str:
    if netloc not in ("", "localhost"):
        raise ValueError(
            f"{method!r} has {netloc!r} for a host: a path begins with a third slash, file:///{netloc}…"
        )
    if not path.strip("/"):
        raise ValueError(f"{method!r} lacks a path, as in 'file:///tmp/my_world'")
    path = path.rstrip("/")
    return os.path.join(os.path.realpath(os.path.dirname(path)), os.path.basename(path))


def _port(text: str) -> int:
    if not text:
        raise ValueError(
            "the environment variable MASTER_PORT is not set: give all processes of a world the same number "
            "(nothing listens there, but it distinguishes worlds), or pass init_method='file:///path'"
        )
    if not text.isascii() or not text.isdigit() or not 1 <= int(text) <= 65535:
        raise ValueError(f"the environment variable MASTER_PORT must be between 1 and 65535, not {text!r}")
    return int(text)


def _check_address(address: str) -> None:
    """Raise if `address` is another machine's: memory cannot be shared with that."""
    if address.lower() in ("", "localhost", socket.gethostname().lower()):
        return
    try:
        found = {(family, where[0]) for family, *_, where in socket.getaddrinfo(address, None)}
    except (OSError, UnicodeError) as error:
        raise ValueError(
            f"the environment variable MASTER_ADDR is {address!r}, which is not known here ({error}): all "
            "ranks run on one machine, so leave it out or set it to localhost"
        ) from None
    if not any(_is_ours(family, str(where)) for family, where in found):
        raise ValueError(
            f"the environment variable MASTER_ADDR is {address!r}, which is another machine: nbparallel's "
            "ranks share memory, so all run on one; set it to localhost and start them here, or use mpi4py"
        )


def _is_ours(family: int, address: str) -> bool:
    """Return whether an address is one of this machine's: only those can be bound to."""
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as sock:
            sock.bind((address, 0))
    except OSError:
        return False
    return True


CELL = 1
"""A script is one cell."""


class ProcessGroup:
    """The membership of this process; made by `join`.

    Owns its connection and its communicator; the store, which belongs to the process, is client rank + 1 of
    the world while it lasts.  In a forked child all of it is inert.

    Parameters
    ----------
    supervisor : SegmentClient, optional
        Of a process that is a client already: its connection.  The store stays what it is.
    """

    def __init__(
        self, admission: Admission, rank: int, filename: str, supervisor: SegmentClient | None = None
    ) -> None:
        self._pid = os.getpid()
        joined = admission.joined
        world_size = len(joined.members)
        self._supervisor, self._channel = supervisor, admission.channel
        self._liveness = SupervisorLiveness(admission.supervisor, joined.members)
        self._store = _store()
        if supervisor is None:
            self._broker = SegmentClient(admission.channel, client=client_of(rank))
            self._store.change_client_id(self._broker.client)
            self._store.connect(self._broker)
        try:
            self.communicator = Communicator(
                admission.control,
                rank,
                world_size,
                self._store,
                epoch=1,
                usable_cpus=joined.usable_cpus,
                liveness_check=self._liveness,
            )
        finally:
            os.close(admission.control)
        self.communicator.begin_cell(CELL, tuple(range(world_size)), filename)
        self._left = False
        self._hook = sys.excepthook
        self._our_hook = self._on_exception  # one object: a bound method is a new one each time
        sys.excepthook = self._our_hook
        self._at_end = _call_at_end(self._at_exit)

    @property
    def is_ours(self) -> bool:
        """Whether this is the process that joined, and not a forked child of it."""
        return os.getpid() == self._pid

    def leave(self, failure: BaseException | None = None) -> None:
        """Leave the world (idempotent).

        What was sent and not received yet stays receivable.  Ranks that wait for this one in an operation get
        an error.

        Raises
        ------
        NbParallelError
            A collective that was begun with ``async_op=True`` could not be finished.
        """
        if self._left or not self.is_ours:
            return
        self._left = True
        try:
            if failure is None:
                self.communicator.finish_cell()
        except BaseException as error:
            failure = error
            raise
        finally:
            self._disconnect(failure)

    def _disconnect(self, failure: BaseException | None) -> None:
        self._at_end()
        if sys.excepthook is self._our_hook:
            sys.excepthook = self._hook
        self.communicator.end_cell(failure)
        for forgotten in self.communicator.forgotten if failure is None else ():
            sys.stderr.write(f"nbparallel: {forgotten}; keep what it returns and call wait()\n")
        for unreleased in self.communicator.unreleased if failure is None else ():
            sys.stderr.write(f"nbparallel: {unreleased}\n")
        if self._supervisor is None:
            self._disconnect_own()
        else:
            with contextlib.suppress(ChannelClosedError):  # the ranks that wait notice its end by themselves
                # before arrays die that other ranks have not received yet
                self._supervisor.send(LeaveWorld())
            self.communicator.close()
            self._channel.close()
        self._liveness.close()

    def _disconnect_own(self) -> None:
        # In this order: arrays that die after the store has left are not released at the supervisor,
        # which keeps them for ranks that have not received them yet.
        self._store.disconnect(self._broker)
        self.communicator.close()
        self._store.change_client_id(0)
        with contextlib.suppress(ChannelClosedError):
            self._channel.send(Kind.LEAVE_WORLD, abandon=lambda: self._liveness.lost() is not None)
        self._broker.close()

    def _on_exception(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        """Leave, so that the other ranks get an error immediately, and show the exception as usual."""
        hook = self._hook
        self.leave(error)
        hook(kind, error, trace)

    def _at_exit(self) -> None:
        self.leave(_in_flight())


def _in_flight() -> BaseException | None:
    """Return the exception with which the function of a process of multiprocessing has ended."""
    error = sys.exc_info()[1]
    if isinstance(error, SystemExit):
        return error.__context__ if error.code not in (None, 0) else None
    return error


def _call_at_end(function: Callable[[], None]) -> Callable[[], object]:
    """Call a function when the program ends; return what takes that back."""
    multiprocessing = sys.modules.get("multiprocessing.process")
    if multiprocessing is not None and multiprocessing.parent_process() is not None:
        from multiprocessing.util import Finalize

        # Some of its processes end without the interpreter's own functions, and none calls sys.excepthook.
        return Finalize(None, function, exitpriority=0).cancel
    atexit.register(function)
    return lambda: atexit.unregister(function)


def join(method: InitMethod, seconds: float, caller: FrameType | None) -> ProcessGroup:
    """Wait for the other processes, and return the membership; errors as `arrive_and_wait`."""
    supervisor = _supervisor_of(_store())
    cpus = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    join = Join(method.rank, method.world_size, _versions(), tuple(sorted(cpus)))
    if supervisor is None:
        admission = arrive_and_wait(method.place, join, seconds)
    else:
        admission = meet_at_supervisor(supervisor, method.place, join, seconds)
    return ProcessGroup(admission, method.rank, _script(caller), supervisor)


def _supervisor_of(store: Store) -> SegmentClient | None:
    """Return this process's connection to its supervisor; None: it is no client of any.

    Raises
    ------
    RuntimeError
        It is a client that cannot be a rank.
    SupervisorDiedError
        Its supervisor has ended.
    """
    if store.client >= FIRST_INTRODUCED:
        for broker in store.brokers:
            if isinstance(broker, SegmentClient):
                return broker
        raise SupervisorDiedError(
            f"the supervisor of process {os.getpid()} has ended, so that it can meet no other process"
        )
    if store.brokers:
        raise RuntimeError(
            "this process has a session of its own, whose ranks are connected already: stop it before "
            "init_process_group(), which is for scripts"
        )
    if store.connected():
        raise RuntimeError(
            "this process has queues, pools or processes of nbparallel.multiprocessing: those processes can "
            "be ranks of a world, this one cannot. Start a process for this rank too, or call "
            "init_process_group() before the first of them"
        )
    return None


def _store() -> Store:
    """Return the store of this process; a new one if it was forked: its parent's is inert here."""
    try:
        return sharing.current_store()
    except ForkedRankError:
        store = Store()
        sharing.set_current_store(store)
        return store


def _versions() -> str:
    """Return what must be the same in all processes: they exchange pickles, and words in memory."""
    python = ".".join(platform.python_version_tuple()[:2])
    version = sys.modules["nbparallel"].__version__  # importing it here would import what it may load
    return f"nbparallel {version}, Python {python}, numpy {np.__version__.split('.')[0]}"


def _script(frame: FrameType | None) -> str:
    """Return the file whose lines errors name: the script, if it is on the stack, else the caller's."""
    main: str | None = getattr(sys.modules.get("__main__"), "__file__", None)
    called_in = frame.f_code.co_filename if frame is not None else ""
    while frame is not None:
        if main is not None and frame.f_code.co_filename == main:
            return main
        frame = frame.f_back
    return called_in
