"""``migrate``: a shared array's memory moves to another sharing strategy, for everybody who looks at it."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from nbparallel import sharing
from nbparallel.errors import SegmentInUseError
from nbparallel.session.interrupts import InterruptCounter
from nbparallel.session.session import Session, running_sessions
from nbparallel.sharing.strategies import registry
from nbparallel.wire.messages import WithdrawTask

S = TypeVar("S", bound=np.generic)


def migrate(x: npt.NDArray[S], strategy: str) -> npt.NDArray[S]:
    """Move the memory of a shared array to another sharing strategy, for everybody, or not at all.

    In the notebook everything that looks at the memory (names, views, lists, tensors) simply shows the new
    one: nothing is re-bound.  Ranks let go of the names under which they know it and are given it again by
    the next cell that uses it; they need not do anything.

    Parameters
    ----------
    x : ndarray
        In shared memory that the notebook made, not packed with other small arrays; or a view of such an
        array: all of that memory moves.
    strategy : str
        Name of a sharing strategy.

    Returns
    -------
    ndarray
        `x` itself: same address, dtype, strides and rights.  It costs one copy of the memory, and for a
        moment room for both.

    Raises
    ------
    SegmentInUseError
        A rank still looks at the memory through a variable of its own or a message that has not been
        received (the error names them), or other arrays share it.  Nothing has changed.
    SharedMemoryFullError, FileDescriptorLimitError
        There is no room for the copy.  Nothing has changed.
    ValueError, StrategyUnavailableError
        `x` is not shared; there is no such strategy, or it does not work here.
    BusyError
        A cell is running.
    RuntimeError
        This is a rank.

    Notes
    -----
    What another *thread* of the notebook writes into the array while it is copied may be lost.  A file that
    was opened with `from_file` stays as it is; the array no longer writes to it.

    Examples
    --------
    >>> import nbparallel as nbp
    >>> a = nbp.ones(100_000)
    >>> part = a[:10]
    >>> migrate(a, "file_system") is a
    True
    >>> a[0] = 7
    >>> float(part[0])
    7.0
    """
    store = sharing.current_store()
    if store.client != 0:
        raise RuntimeError("only the notebook migrates arrays; a rank works on `x.copy()`")
    chosen = registry.find_strategy(strategy)
    before = store.movable(x)
    if before.strategy == strategy:
        return x
    if not chosen.shares:
        chosen.create(1)  # says why not
    with ExitStack() as session_lock:
        sessions = running_sessions()
        for session in sessions:
            presses = session_lock.enter_context(session._session_lock.take())
            _withdraw(session, before.segment, presses)
        store.rehome(x, chosen)
        after = store.movable(x).segment
        for session in sessions:
            session._names.rehomed(before.segment, after)
    return x


def _withdraw(session: Session, segment: int, presses: InterruptCounter) -> None:
    """Have a session's ranks let go of a segment; raise if one cannot."""
    pool = session._pool
    if pool is None or pool.lost:
        return
    who = tuple(handle.rank for handle in pool.handles if handle.death is None)
    if not who:
        return
    session._names.withdraw(segment)
    tasks = session._tasks
    number = tasks.next_number()
    task = WithdrawTask(number, who, (), True, None, segment)
    launched = tasks.launch(pool, number, who, lambda _: task, presses, notes=[])
    result = tasks.finish(launched, presses)
    held = {rank: what for rank, what in result.values.items() if what}
    if held:
        listed = "; ".join(f"rank {rank}: {', '.join(what[:5])}" for rank, what in held.items())
        raise SegmentInUseError(
            f"the array stays where it is, because ranks still look at its memory ({listed}): delete these "
            "there (`%parallel del name`), or work on `nbp.share(x.copy(), strategy=…)`"
        )
