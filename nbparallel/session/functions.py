"""map, imap and spawn: a function with the notebook's ranks, or with ranks for this call alone."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, TypeVar

from nbparallel import sharing
from nbparallel.distributed import call_with_rank
from nbparallel.errors import without_frames
from nbparallel.session import running_sessions
from nbparallel.session.output import LineSink, OutputSink
from nbparallel.session.session import Session
from nbparallel.session.tasks.item_map import ItemMap

__tracebackhide__ = True  # of pytest: an error of a rank shows the test, not the way here
_T = TypeVar("_T")
_R = TypeVar("_R")


@without_frames()
def map(
    function: Callable[[_T], _R],
    items: Iterable[_T],
    *more: Iterable[Any],
    progress: bool = True,
    errors: str = "raise",
    timeout: float | None = None,
    profile: bool = False,
) -> list[_R]:
    """Return ``[function(item) for item in items]``, done by the ranks.

    A rank that is free takes the next item, so that items may take unequally long.  In a notebook the ranks
    are those of ``%%parallel``, which are started if none run; in a script those of the session that runs, or
    one for each CPU for this call alone.

    Parameters
    ----------
    function : callable
        Called with one item, on any rank.  One of the notebook travels by value, with the globals that it
        reads; what it prints is shown behind its rank.
    items : iterable
        One, such as ``zip(xs, ys)``.  A generator is made a list first; of an array each item is a row
        (``array[i]``).  Shared arrays arrive as the same memory, with their rights; all else is copied.
    progress : bool
        Show how many items are done: tqdm's bar, or a line where tqdm is not installed.
    errors : {"raise", "return"}
        End with the first error, or have the exception as the result of its item and go on.  It has no
        traceback; one that cannot travel is a `RuntimeError` with its class and text.
    timeout : float, optional
        Seconds for one item.  Then the function is interrupted there (`KeyboardInterrupt`, by SIGALRM), and
        its item raises `TimeoutError`; the rank goes on with the next.  Code that does not return to Python
        cannot be interrupted: 5 s later its rank is ended, and the next cell or map starts it again, without
        its variables.  Then the map has failed; with ``errors="return"`` the other ranks do the rest.
    profile : bool
        Measure each line of the function, and of others that it calls: ``%parallel_profile`` then shows how
        long each took on each rank.

    Returns
    -------
    list
        In the order of the items.  Each result is a copy of what the function returned when it returned.

    Raises
    ------
    TypeError
        `function` cannot be called, or `items` has no items.
    ValueError
        `errors` is neither, or `timeout` is not positive.
    UnpicklableError
        An item cannot travel; it is named, and none is begun.
    ParallelError
        The function raised, a result cannot travel, or a rank died: rank and item of the first failure are in
        the message.  No other item is begun.  ``.result`` has the results of items that are done, by index.
    KeyboardInterrupt
        It was interrupted; the text says how many items were done, and ``.result`` has their results.
    BusyError
        The ranks run something else.
    RuntimeError
        This is a rank, or several sessions run.

    Notes
    -----
    As ``multiprocessing.Pool.map``, but that up to 511 items are taken one by one; of more, the first ones
    are taken several at a time, and the last ones alone.  The function may not use operations between ranks:
    the others are at items of their own; collectives raise `RuntimeError`.

    Examples
    --------
    >>> nbparallel.map(len, ["a", "bb"])  # doctest: +SKIP
    [1, 2]
    """
    chosen = ItemMap(
        function, items, *more, progress=progress, errors=errors, timeout=timeout, profile=profile
    )
    with chosen, _session() as (session, sink):
        return chosen.results(partial(session.perform, chosen.make, sink, chosen))


def imap(
    function: Callable[[_T], _R],
    items: Iterable[_T],
    *more: Iterable[Any],
    ordered: bool = True,
    progress: bool = True,
    errors: str = "raise",
    timeout: float | None = None,
) -> Iterator[_R]:
    """Return an iterator over results of `map`, each as soon as it is there.

    The ranks begin with the first ``next``, and go on while the caller uses a result; until they have done
    all items they are busy.  Leaving the loop ends their work, as the notebook's stop button does.

    Parameters
    ----------
    ordered : bool
        Yield results in the order of the items; or as they come, which of them first being chance.

    Other parameters and errors are those of `map`; an error comes behind the results before it, and its
    ``.result`` has those that were not yielded.

    Examples
    --------
    >>> for length in nbparallel.imap(len, ["a", "bb"]):  # doctest: +SKIP
    ...     print(length)
    1
    2
    """
    chosen = ItemMap(function, items, *more, progress=progress, errors=errors, timeout=timeout)

    def results() -> Iterator[_R]:
        with _session() as (session, sink):
            yield from chosen.iterate(partial(session.begin, chosen, sink), ordered=ordered)

    return results()


@contextlib.contextmanager
def _session() -> Iterator[tuple[Session, OutputSink]]:
    """Return the notebook's session, or that of the script, or one for the block; and where output goes."""
    if sharing.current_store().client != 0:
        raise RuntimeError(
            "map is for the notebook; on a rank take a part of the items, as in dist.shard(items)"
        )
    session, sink = running_sessions.current()
    if session is None:
        with Session() as fresh:
            yield fresh, LineSink()
    elif sink is None:
        yield session, LineSink()
    else:
        try:
            yield session, sink
        finally:
            sink.finish()  # before an error is shown; the session has done so unless it could not start


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
