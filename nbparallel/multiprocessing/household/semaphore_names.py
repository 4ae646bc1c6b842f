"""Names of semaphores and of a rank's folder, by which the supervisor finds what processes have left.

A lock of `spawn` or `forkserver` has a name until its maker ends, or its resource tracker; a notebook's front
end kills both together.  The names come from the configuration of the current process, which a process that
it starts inherits.  So does the name of multiprocessing's temporary folder, for sockets: a rank ends without
the library's last steps, which would remove it.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import sys
import tempfile
from multiprocessing.process import current_process

_LIBRARYS = "/mp"


def name_semaphores() -> str:
    """Have names of this process's semaphores begin with its family's own word from now on; return that.

    In a rank it is that of the session, and its temporary folder is called after it as well; in another
    process it is a new one unless its parent has one.
    """
    config = current_process()._config  # type: ignore[attr-defined]
    if config["semprefix"] == _LIBRARYS:
        sharing = sys.modules.get("nbparallel.sharing")
        is_rank = sharing is not None and sharing.current_store().client
        session = os.environ.get("NBP_SESSION") if is_rank else None
        config["semprefix"] = f"/nbp-{session or secrets.token_hex(7)}"
        if session and not config.get("tempdir"):
            with contextlib.suppress(OSError):  # what needs a folder then fails by itself
                config["tempdir"] = tempfile.mkdtemp(prefix=f"nbp-{session}-")
    prefix: str = config["semprefix"]
    return prefix[1:]
