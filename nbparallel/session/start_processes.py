"""spawn: one function on fresh ranks, from their start to their end."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from nbparallel.distributed import call_with_rank
from nbparallel.session.session import Session

__tracebackhide__ = True  # of pytest: an error of a rank shows the test, not the way here


def spawn(
    function: Callable[..., Any],
    args: Sequence[Any] = (),
    nprocs: int = 1,
    join: bool = True,
    daemon: bool = False,
    start_method: str = "forkserver",
) -> None:
    """Call ``function(rank, *args)`` on `nprocs` fresh ranks, and wait until all have returned.

    What they print is printed here, each line behind its rank.  The ranks communicate through
    `nbparallel.distributed`, and have ended when this returns, whatever happened.

    Parameters
    ----------
    function : callable
        One that is defined in ``__main__`` travels by value; no ``if __name__ == "__main__"`` is needed.
    args : sequence
        Shared arrays arrive as the same memory, and so do arrays that you shared with `nbparallel.share`;
        everything else is copied.
    nprocs : int
        How many ranks.
    join : bool
        True: this waits.  To continue while they run, use a `nbparallel.Session` and its `submit`.
    daemon : bool
        torch's; it changes nothing: no rank outlives this process.
    start_method : {"forkserver", "spawn"}
        As for `nbparallel.Session`.

    Raises
    ------
    ParallelError
        Ranks failed; ``.errors`` maps rank to exception.  The others were released.
    KeyboardInterrupt
        It was interrupted.

    Notes
    -----
    As ``torch.multiprocessing.spawn``; what the functions return is dropped.  `Session.call` returns it
    and keeps the ranks.

    Examples
    --------
    >>> def train(rank, steps):
    ...     for step in range(steps):
    ...         loss = nbparallel.distributed.all_reduce(float(rank))
    >>> nbparallel.spawn(train, args=(100,), nprocs=4)  # doctest: +SKIP
    """
    if not callable(function):
        raise TypeError(f"spawn needs a function to call, not {type(function).__name__}")
    if isinstance(args, str) or not isinstance(args, Iterable):
        raise TypeError(f"spawn needs the arguments as a tuple, args=({args!r},), not {type(args).__name__}")
    if not join:
        raise ValueError(
            "spawn waits for its ranks; join=False is not possible: use nbparallel.Session and its submit()"
        )
    with Session(nprocs, start_method=start_method) as session:
        session.call(call_with_rank, function, tuple(args))
