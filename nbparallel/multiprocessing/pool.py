"""Our `Pool`; everything else is the library's ``multiprocessing.pool``."""

from __future__ import annotations

from multiprocessing import pool as library
from typing import Any

from nbparallel.multiprocessing.workers.worker_pool import Pool as Pool


def __getattr__(name: str) -> Any:
    return getattr(library, name)
