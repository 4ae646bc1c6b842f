"""Checks the arguments of `init_process_group`: rank, world size, the directory of the rendezvous."""

from __future__ import annotations

import datetime
import os
import socket
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote, urlsplit

from nbparallel.wire.control_layout import MAX_WORLD_SIZE

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


@dataclass(frozen=True, slots=True)
class InitMethod:
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


def _path(method: str, host: str, path: str) -> str:
    if host not in ("", "localhost"):
        raise ValueError(
            f"{method!r} has {host!r} for a host: a path begins with a third slash, file:///{host}…"
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
