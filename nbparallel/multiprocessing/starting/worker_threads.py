"""How many threads the numeric libraries of a worker have."""

from __future__ import annotations

import os
import sys
from typing import Any

from threadpoolctl import ThreadpoolController

from nbparallel.wire.system import THREAD_VARIABLES, threads_from_environment

ThreadpoolController()  # the first search of a process takes 15 ms: here it is over before others are forked


def limit_threads(threads: int, *, insist: bool = False) -> None:
    """Give the libraries of a worker this many threads, or the fewer that they have.

    What the user has set in the environment stays, unless they `insist` on another number.
    """
    names = {name for name in os.environ if insist and name.endswith("_NUM_THREADS")}
    names |= {name for name in THREAD_VARIABLES if insist or name not in os.environ}
    os.environ.update(dict.fromkeys(names, str(threads)))
    for one in ThreadpoolController().lib_controllers:
        wanted = threads_from_environment(one.internal_api) or threads
        if insist or wanted < one.num_threads:
            one.set_num_threads(wanted)
    torch: Any = sys.modules.get("torch")  # it keeps a number of its own beside that of OpenMP
    if torch is not None and (insist or threads < torch.get_num_threads()):
        torch.set_num_threads(threads)
