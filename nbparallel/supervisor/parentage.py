"""Who dies with whom: subreapers and parent-death signals.

Some facts (prctl(2), PR_SET_CHILD_SUBREAPER, PR_SET_PDEATHSIG):

* a subreaper becomes the parent of every orphan below it, so that it, and not init, reaps them;
* the parent-death signal follows the *thread* that made the process, not the process: only a process with
  one thread may use it for its children, which is why the kernel does not start ranks itself;
* it is cleared by fork and kept by exec; the parent may have died before it was armed, so `getppid` is
  asked again afterwards.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"prctl({option}, {value}): {os.strerror(number)}")


def adopt_orphans() -> None:
    """Make this process the parent of every orphan below it."""
    if sys.platform == "linux":
        _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent(parent: int) -> None:
    """Arm SIGKILL for the death of `parent`; end at once if it is gone already."""
    if sys.platform == "linux":
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def reset_signals() -> None:
    """Undo what exec passes on: blocked signals and ignored ones.

    An ignored SIGCHLD would make the system throw exit statuses away (waitpid(2)).
    """
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    for number in signal.valid_signals():
        try:
            if signal.getsignal(number) is signal.SIG_IGN and number != signal.SIGPIPE:
                signal.signal(number, signal.SIG_DFL)
        except (OSError, ValueError):  # SIGKILL, SIGSTOP and the C library's own cannot be changed
            continue
