"""The strategy `copy`: no shared memory; every rank gets its own copy, as with most other libraries.

It is the baseline to compare with.  Arrays of the notebook travel as other objects do (the first time, and
again when their content has changed), and asking for shared memory is an error.
"""

from __future__ import annotations

import os
from typing import NoReturn

from nbparallel.errors import StrategyUnavailableError
from nbparallel.sharing.memory.mapping import Access, Content
from nbparallel.sharing.strategies.strategy import Intend, SegmentSource, Strategy, no_session


class CopyStrategy(Strategy):
    """No shared memory: every rank has its own copy."""

    # docstrings inherited

    name = "copy"
    unavailable_reason = None
    needs_clean_up = False
    shares = False

    def create(
        self, nbytes: int, content: Content | None = None, intend: Intend = no_session
    ) -> SegmentSource:
        _refuse()

    def adopt(self, fd: int, nbytes: int) -> SegmentSource:
        os.close(fd)
        _refuse()

    def map(self, source: SegmentSource, access: Access) -> NoReturn:
        _refuse()


def _refuse() -> NoReturn:
    raise StrategyUnavailableError(
        "the sharing strategy 'copy' has no shared memory: choose another one with `%sharing_strategy NAME` "
        '(nbp.set_sharing_strategy), or for this array alone: nbp.share(x, strategy="file_descriptor")'
    )
