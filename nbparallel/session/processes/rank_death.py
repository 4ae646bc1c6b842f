"""How a rank's process ended, and how a message describes it."""

from __future__ import annotations

import re
from dataclasses import dataclass

from nbparallel.wire.messages import CELL_FILE
from nbparallel.wire.system import signal_name


@dataclass(frozen=True, slots=True)
class RankDeath:
    """The end of a rank's process: exit code or signal, and what is known of the cause."""

    pid: int
    """Its process id, 0 if it never had one."""
    exit_code: int | None
    """Its exit code; None if a signal ended it."""
    signal_number: int | None
    """The signal; None if it exited."""
    announced: bool
    """Whether it had announced itself to the supervisor before."""
    seen: float
    """`time.monotonic` when this process received the notice."""
    refused: int = 0
    """The number of the system's error if the process could not be made (`errno`), else 0."""
    reason: str = ""
    """A known cause, as the end of a sentence that begins with ``was``; or empty."""

    @property
    def signal_name(self) -> str | None:
        """``"SIGKILL"`` and so on."""
        return None if self.signal_number is None else signal_name(self.signal_number)


_LIKELY_CAUSE = {
    "SIGKILL": "killed by SIGKILL: by hand, or by the system because memory ran out",
    "SIGSEGV": "crashed (SIGSEGV): C code touched memory that is not its own, or wrote to an array that "
    "ranks may only read (scipy with overwrite_a=True or in scipy.linalg.blas and lapack, torch after "
    "from_numpy, and np.add.at do: copy the array first, or `--share` it)",
    "SIGBUS": "crashed (SIGBUS): the memory behind a mapping is gone (was a mapped file made shorter?)",
    "SIGABRT": "aborted (SIGABRT): C code called abort()",
    "SIGFPE": "crashed (SIGFPE): C code divided by zero",
    "SIGTERM": "was ended by SIGTERM",
}


CLOSED_SOCKETS = (
    "ended, because code there closed file descriptors that are not its own (os.close, os.closerange), over "
    "which a rank and the notebook communicate"
)


def describe_death(end: RankDeath) -> str:
    """Return the end of a sentence: ``was killed by SIGKILL …``."""
    name = end.signal_name
    if end.reason:
        return f"was {end.reason}"
    if name is not None:
        return (
            "was " + _LIKELY_CAUSE[name]
            if name == "SIGKILL"
            else _LIKELY_CAUSE.get(name, f"was ended by {name}")
        )
    if end.exit_code is None:
        return "ended; its exit status is unknown"
    return f"ended with exit code {end.exit_code} (os._exit, or C code that calls exit)"


BEGIN = "Fatal Python error"
_FRAME = "  File "
_CELL_FRAME = re.compile(rf'"{CELL_FILE}\d+-\d+>", line (\d+)')


def stderr_excerpt(stderr: str) -> tuple[str, int | None]:
    """Return what is worth showing of a dead rank's stderr, and the cell's line if faulthandler names it.

    Of faulthandler's report that is the user's part of the stack: what called the cell is ours.
    """
    lines = stderr.strip().splitlines()
    begin = next((n for n, line in enumerate(lines) if line.startswith(BEGIN)), None)
    if begin is None:
        return "\n".join(lines[-10:]), None
    shown = lines[max(0, begin - 5) : begin]
    for line in lines[begin:]:
        found = _CELL_FRAME.search(line) if line.startswith(_FRAME) else None
        shown.append(line if found is None else _CELL_FRAME.sub(r"of the cell, line \1", line))
        if found is not None:
            return "\n".join(shown[:20]), int(found[1])
    return "\n".join(shown[:20]), None
