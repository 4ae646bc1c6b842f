"""Names of semaphores, by which the supervisor finds those that killed processes left.

A lock of `spawn` or `forkserver` has a name until its maker ends, or its resource tracker; a notebook's front
end kills both at once.  The names come from the configuration of the current process, which a process that
it starts inherits.
"""

from __future__ import annotations

import os
import secrets
import sys
from multiprocessing.process import current_process

_LIBRARYS = "/mp"


def name_semaphores() -> str:
    """Have names of this process's semaphores begin with its family's own word from now on; return that.

    In a rank it is that of the session, in another process a new one unless its parent has one.
    """
    config = current_process()._config  # type: ignore[attr-defined]
    if config["semprefix"] == _LIBRARYS:
        sharing = sys.modules.get("nbparallel.sharing")
        is_rank = sharing is not None and sharing.current_store().client
        session = os.environ.get("NBP_SESSION") if is_rank else None
        config["semprefix"] = f"/nbp-{session or secrets.token_hex(7)}"
    prefix: str = config["semprefix"]
    return prefix[1:]
