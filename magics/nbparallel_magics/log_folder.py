"""The folder of a notebook's logs: made when first needed, removed with the kernel or when we are unloaded.

Who is killed cannot remove anything.  So the folder says whose it is, and the next notebook that loads us
removes folders whose owner is dead for sure; all others stay.
"""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
import threading
from pathlib import Path

from nbparallel.wire import owners
from nbparallel.wire.identity import boot_time, this_process, this_world
from nbparallel.wire.owners import Owner

PREFIX = "nbparallel-output-"
_OWNER = "owner"
"""A link inside the folder that leads nowhere: its text says whose the folder is (`wire.owners`)."""


class LogFolder:
    """Owns a folder in the usual temporary place, for this process alone to write and this user to read."""

    def __init__(self) -> None:
        self._path = ""
        self._count = 0
        self._removed = False
        self._pid = os.getpid()
        self._lock = threading.Lock()

    def new_log(self) -> str:
        """Return the path of a new empty file; `OSError` if there is no place for one."""
        with self._lock:
            if self._removed:
                raise FileNotFoundError("the extension was unloaded")
            if not os.path.isdir(self._path):  # not made yet, or somebody has cleaned up the temporary place
                self._path = _make()
            self._count += 1
            path = os.path.join(self._path, f"output-{self._count}.log")
        os.close(new_file(path))
        return path

    def remove(self) -> None:
        """Remove the folder and all that is in it; again is fine, and a forked child removes nothing."""
        if os.getpid() != self._pid:
            return
        with self._lock:
            path, self._path, self._removed = self._path, "", True
        if path:
            shutil.rmtree(path, ignore_errors=True)


def new_file(path: str) -> int:
    """Make a file that is nobody else's, and return its descriptor."""
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)


def _make() -> str:
    path = tempfile.mkdtemp(prefix=PREFIX)
    me = this_process()
    try:
        os.symlink(Owner(this_world(), me, (me,)).text(), os.path.join(path, _OWNER))
    except OSError:
        pass  # a file system without links: only we shall remove it
    return path


def remove_abandoned() -> None:
    """Remove what killed notebooks of this user left, without waiting for it."""
    try:
        found = [entry for entry in os.scandir(tempfile.gettempdir()) if entry.name.startswith(PREFIX)]
    except OSError:
        return
    if found:
        folders = [Path(entry.path) for entry in found]
        threading.Thread(target=sweep, args=(folders,), name="nbparallel-old-logs", daemon=True).start()


def sweep(folders: list[Path]) -> None:
    """Remove those folders of this user whose owner is dead for sure."""
    from nbparallel.supervisor.owner_liveness import Coroner, Fate
    from nbparallel.supervisor.sweep import lies_on_local_disk

    coroner = Coroner(this_world(), boot_time())
    for folder in folders:
        try:
            status, record = os.lstat(folder), os.lstat(folder / _OWNER)
            owner = Owner.parse(owners.read(str(folder / _OWNER)))
            on_disk = lies_on_local_disk(str(folder))
        except (OSError, ValueError):
            continue  # just made, another user's, or not made by us
        ours = stat.S_ISDIR(status.st_mode) and status.st_uid == record.st_uid == os.geteuid()
        if ours and coroner.judge(owner, record.st_ctime, on_disk=on_disk).fate is Fate.DEAD:
            shutil.rmtree(folder, ignore_errors=True)
