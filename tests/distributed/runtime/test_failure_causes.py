"""What a rank keeps of the error that ended its operations: what it says, not what its frames hold."""

from __future__ import annotations

import pytest

from nbparallel import errors
from nbparallel.distributed.runtime.failures import without_frames
from nbparallel.errors import PeerFailedError
from nbparallel.session import Session


class Fuller(errors.SharedMemoryFullError):
    """A class of the user's."""


class Silent(errors.NbParallelError):
    """Has no text that could be had."""

    def __str__(self) -> str:
        raise RuntimeError("no text")


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (errors.SharedMemoryFullError("no room"), errors.SharedMemoryFullError),
        (Fuller("no room"), Fuller),
        (errors.FileDescriptorLimitError("no room"), errors.FileDescriptorLimitError),
        (errors.DeadlockError("no room"), errors.DeadlockError),
        (errors.ParallelError("no room", {0: ValueError()}), PeerFailedError),
        (ValueError("no room"), PeerFailedError),
        (ExceptionGroup("no room", [ValueError()]), PeerFailedError),
        (Silent(), Silent),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else "",
)
def test_a_kept_error_says_the_same(error: BaseException, kind: type[BaseException]) -> None:
    """Of its own kind if that is ours, whatever built-in class it derives from as well."""
    try:
        raise error
    except BaseException as caught:  # noqa: BLE001  any kind
        kept = without_frames(caught, 3)
    assert type(kept) is kind
    assert kept is not error
    assert kept.__traceback__ is None
    assert getattr(kept, "rank", None) == 3
    if kind is not Silent:
        assert "no room" in str(kept)


@pytest.mark.slow
def test_a_rank_survives_want_of_memory() -> None:
    """Any of our errors ends the cell, never the rank: it keeps its variables."""
    with Session(2) as session:
        session.run("kept = rank + 10")
        with pytest.raises(errors.ParallelError) as caught:
            session.run("if rank == 1: raise nbp.errors.SharedMemoryFullError('no room')\nbarrier()")
        assert isinstance(caught.value.errors[1], errors.SharedMemoryFullError)
        assert session.run("barrier(); kept").values == [10, 11]
