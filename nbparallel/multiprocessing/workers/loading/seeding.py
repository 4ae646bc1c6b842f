"""Random numbers that depend on the batch alone, whichever process makes it."""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Iterator

import numpy as np

_WORDS = 8
"""32-bit words of each generator's seed.  Of the same words Python and numpy would make the same numbers."""


@contextlib.contextmanager
def seeded(*numbers: int, restore: bool) -> Iterator[None]:
    """Seed `random`, `numpy.random` and, where it is loaded, torch from numbers that name a batch.

    Parameters
    ----------
    restore : bool
        Put back afterwards what was there: the generators are the caller's.
    """
    torch = sys.modules.get("torch")
    generator = getattr(torch, "default_generator", None)
    before = (
        (random.getstate(), np.random.get_state(), None if generator is None else generator.get_state())
        if restore
        else None
    )
    pythons, numpys, torchs = np.random.SeedSequence(numbers).generate_state(3 * _WORDS).reshape(3, _WORDS)
    random.seed(int.from_bytes(pythons.tobytes(), "little"))
    np.random.seed(numpys)
    if generator is not None:
        generator.manual_seed(int(torchs[0]) << 31 | int(torchs[1]) >> 1)
    try:
        yield
    finally:
        if before is not None:
            random.setstate(before[0])
            np.random.set_state(before[1])
            if generator is not None:
                generator.set_state(before[2])
