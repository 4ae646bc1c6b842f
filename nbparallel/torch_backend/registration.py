"""The entry point that torch calls when it is imported: the name of the backend, and no more.

What does the work is imported with the first process group.  On a rank of a session, `nbparallel` is also the
backend of ``init_process_group()`` without arguments, and the ranks meet without a port.
"""

from __future__ import annotations

import gc
import sys
import warnings
from typing import Any

from nbparallel.torch_backend.replacements import NAME, replace_everywhere, replace_on_session_rank


def register() -> None:
    """Give torch.distributed the backend ``nbparallel``; whatever happens, ``import torch`` goes on."""
    try:
        _register()
    except Exception as error:  # noqa: BLE001  torch would not be importable
        warnings.warn(f"torch.distributed has no backend nbparallel: {error!r}", RuntimeWarning, stacklevel=2)


def _register() -> None:
    torch_distributed = sys.modules.get("torch.distributed")
    if torch_distributed is None or not torch_distributed.is_available():
        return
    backend = torch_distributed.Backend
    if NAME in backend.backend_list:
        return
    backend.register_backend(NAME, _make_group, extended_api=True, devices=["cpu"])
    replace_everywhere(torch_distributed)
    ours = sys.modules.get("nbparallel.distributed")
    if ours is not None and ours.is_session_rank():
        replace_on_session_rank(torch_distributed)


def _make_group(options: Any, backend_options: object = None) -> Any:
    collecting = gc.isenabled()
    gc.disable()  # what is imported stays; to look through all of torch for it takes a third of the time
    try:
        from nbparallel.torch_backend.membership import make_group
    finally:
        if collecting:
            gc.enable()
    return make_group(options, backend_options)
