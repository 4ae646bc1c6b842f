"""Refusals: what the system did not give when ranks were to be started, and which limit was in the way."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
from collections.abc import Iterator

from nbparallel.errors import StartError
from nbparallel.wire import system
from nbparallel.wire.units import size_text


@contextlib.contextmanager
def as_start_error(what: str) -> Iterator[None]:
    """Raise `StartError` if the system refuses `what` inside of the block."""
    try:
        yield
    except OSError as error:
        raise start_error(what, error) from error
    except AttributeError as error:  # a Python that was built on a system without the call
        raise start_error(what, OSError(errno.ENOSYS, str(error))) from error
    except RuntimeError as error:
        if "new thread" not in str(error):
            raise
        raise start_error(what, OSError(errno.EAGAIN, str(error))) from error


def start_error(what: str, error: OSError) -> StartError:
    """Return the error that says what the system refused, why, and what to do."""
    return StartError(f"the system refused {what} ({error.strerror or error}): {_cause(error.errno or 0)}")


def _cause(number: int) -> str:
    if number == errno.EAGAIN:
        return f"{_tasks()}; run fewer ranks, end other programs, or raise the limit"
    if number == errno.EMFILE:
        soft, _ = system.process_limit(resource.RLIMIT_NOFILE)
        return f"this process may have {soft} open files; close some, or raise the limit (ulimit -n)"
    if number == errno.ENFILE:
        return "this machine has too many open files (sysctl fs.file-max); close some"
    if number == errno.EFBIG:
        soft, _ = system.process_limit(resource.RLIMIT_FSIZE)
        most = "" if soft is None else f" of {size_text(soft)}"
        return f"shared memory counts as a file, and the limit{most} on the size of files is too low; " + (
            "start the notebook or script without it (ulimit -f unlimited)"
        )
    if number in (errno.ENOMEM, errno.ENOBUFS, errno.ENOSPC, errno.EDQUOT):
        return (
            "this machine or container is short of memory; delete large variables, end other programs, or "
            "run fewer ranks"
        )
    if number in (errno.EPERM, errno.EACCES, errno.ENOSYS):
        return (
            "it takes Linux 5.3 or newer, and a container whose seccomp profile allows it (Docker's does "
            "since 20.10)"
        )
    return os.strerror(number)


def _tasks() -> str:
    full = [limit for limit in system.task_limits() if limit.used + 1 >= limit.most] or [
        *system.task_limits()
    ]
    if not full:
        return "the system has no room for more processes and threads"
    limit = min(full, key=lambda limit: limit.most - limit.used)
    return f"there are {limit.used} processes and threads of the {limit.most} that {limit.where}"
