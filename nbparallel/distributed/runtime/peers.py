"""The other ranks of an epoch, as their words in the control segment show them (failed, died, left)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from nbparallel.distributed.runtime.failures import first_failure
from nbparallel.distributed.runtime.peer_memory import PeerMemory
from nbparallel.distributed.runtime.supervisor_liveness import LivenessCheck
from nbparallel.errors import NbParallelError
from nbparallel.wire.control import ControlView
from nbparallel.wire.identity import WorldPlace


class Peers:
    """What one rank knows of the others.

    Attributes
    ----------
    ranks : tuple of int
        All ranks but this one.
    memory : PeerMemory
        Their private memory, as far as this rank can read it.
    liveness_check : LivenessCheck or None
        Whether death records are still written; None: ranks exit with the supervisor that writes them.
    hosts : WorldPlace or None
        Of a world on several hosts: where its ranks are.
    """

    def __init__(self, view: ControlView, rank: int) -> None:
        self._view, self._words = view, view.words
        self._failure_words = [(view.word_failed(r), view.word_death(r)) for r in range(view.world_size)]
        # One word of every rank: `tolist` reads 64 of them in a microsecond, a look at each takes twenty.
        self._failed, self._died, self._left = map(
            self._of_all, (view.word_failed, view.word_death, view.word_left)
        )
        self.ranks = tuple(r for r in range(view.world_size) if r != rank)
        self.memory = PeerMemory(view, rank)
        self.liveness_check: LivenessCheck | None = None
        self.hosts: WorldPlace | None = None

    def _of_all(self, word: Callable[[int], int]) -> memoryview:
        """Return that word of every rank, in rank order."""
        first, size = word(0), self._view.world_size
        stride = word(1) - first if size > 1 else 1
        return self._words[first : first + size * stride : stride]

    def has_failed(self, rank: int) -> bool:
        """Whether a rank has failed or died."""
        failed, died = self._failure_words[rank]
        return bool(self._words[failed] or self._words[died])

    def first_failure(self, ranks: Sequence[int]) -> NbParallelError | None:
        """Return the error for what went wrong first on any of `ranks`, None if nothing did."""
        if not any(self._failed.tolist()) and not any(self._died.tolist()):
            return None
        return first_failure(self._view, ranks) if any(map(self.has_failed, ranks)) else None

    def has_left(self, rank: int, cell: int) -> bool:
        """Whether a rank has left a cell."""
        return self._words[self._view.word_left(rank)] >= cell

    def all_left(self, cell: int) -> list[int]:
        """Return the ranks that have left a cell."""
        return [rank for rank, last in enumerate(self._left.tolist()) if last >= cell]

    def may_still_write(self, rank: int, cell: int) -> bool:
        """Whether a rank may be writing into arrays of this one."""
        check = self.liveness_check
        return bool(
            self._words[self._view.word_writing(rank)]
            and not self._words[self._view.word_death(rank)]
            and not self.has_left(rank, cell)
            and not (check is not None and check.vanished(rank))
        )

    def lost(self) -> NbParallelError | None:
        """Return why the death of a peer would go unnoticed from now on; None: it would not."""
        return None if self.liveness_check is None else self.liveness_check.lost()

    def close(self) -> None:
        """Release everything that refers to the control segment."""
        self.memory.close()
        for words in (self._failed, self._died, self._left):
            words.release()
