"""What scripts ask about backends and launchers before they choose one; there is one backend."""

from __future__ import annotations

import os

BACKEND = "nbparallel"
"""Its name."""


def is_backend_available(backend: str) -> bool:
    """Return whether `backend` is ``"nbparallel"`` or ``"gloo"``, which is taken for it."""
    return backend.lower() in (BACKEND, "gloo")


def is_gloo_available() -> bool:
    """Return True: ``init_process_group("gloo")`` works, on shared memory."""
    return True


def is_nccl_available() -> bool:
    """Return False: operations do not move data between GPUs."""
    return False


def is_mpi_available() -> bool:
    """Return False."""
    return False


def is_ucc_available() -> bool:
    """Return False."""
    return False


def is_xccl_available() -> bool:
    """Return False."""
    return False


def is_torchelastic_launched() -> bool:
    """Return whether torchrun started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ
