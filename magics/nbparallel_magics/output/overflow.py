"""Log files for the output of a cell beyond what a notebook should hold."""

from __future__ import annotations

import base64
import contextlib
import json
import mimetypes
import os
import shutil
import stat
import tempfile
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from nbparallel.wire import locked_names
from nbparallel.wire.units import size_text
from nbparallel_magics.output.layout import Item, Rich, Text

PREFIX = "nbparallel-output-"
_LOCK = ".lock"
"""A file inside the folder, locked as long as the notebook lives (`wire.locked_names`)."""


class LogFolder:
    """A temporary folder of log files, written by this process and readable by this user alone."""

    def __init__(self) -> None:
        self._path = ""
        self._lock_fd = -1
        self._count = 0
        self._removed = False
        self._pid = os.getpid()
        self._lock = threading.Lock()

    def new_log(self) -> str:
        """Return the path of a new empty file; `OSError` if there is no place for one."""
        with self._lock:
            if self._removed:
                raise FileNotFoundError("the extension was unloaded")
            if not os.path.isdir(self._path):  # not made yet, or removed by a clean-up of temporary files
                self._release()
                self._path, self._lock_fd = _make()
            self._count += 1
            path = os.path.join(self._path, f"output-{self._count}.log")
        os.close(new_file(path))
        return path

    def remove(self) -> None:
        """Remove the folder and its files (idempotent); a forked child removes nothing."""
        if os.getpid() != self._pid:
            return
        with self._lock:
            path, self._path, self._removed = self._path, "", True
            if path:
                shutil.rmtree(path, ignore_errors=True)
            self._release()

    def _release(self) -> None:
        fd, self._lock_fd = self._lock_fd, -1
        if fd >= 0:
            os.close(fd)


def new_file(path: str) -> int:
    """Create a file that did not exist, for this user alone, and return its descriptor."""
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)


def _make() -> tuple[str, int]:
    """Return a new folder, and the descriptor that holds its lock."""
    path = tempfile.mkdtemp(prefix=PREFIX)
    fd = new_file(os.path.join(path, _LOCK))
    if locked_names.hold(fd):
        return path, fd
    os.close(fd)  # a sweep has found it in this moment
    return _make()


def remove_abandoned() -> None:
    """Remove log folders of this user's killed notebooks, in the background."""
    try:
        found = [entry for entry in os.scandir(tempfile.gettempdir()) if entry.name.startswith(PREFIX)]
    except OSError:
        return
    if found:
        folders = [Path(entry.path) for entry in found]
        threading.Thread(target=sweep, args=(folders,), name="nbparallel-old-logs", daemon=True).start()


def sweep(folders: list[Path]) -> None:
    """Remove those folders of this user whose lock no process holds."""
    for folder in folders:
        try:
            status = os.lstat(folder)
            ours = stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()
            if not ours or locked_names.unseen_reason(str(folder)):
                continue
            fd = locked_names.seize(str(folder / _LOCK))
        except OSError:
            continue  # in use, just made, or not made by us
        try:
            shutil.rmtree(folder, ignore_errors=True)
        finally:
            os.close(fd)


LARGEST_LOG = 1_000_000_000
"""Bytes; a cell that prints without end must not fill the disk."""


class OverflowLog:
    """Writes output in order of arrival, with a label wherever the rank changes.

    Parameters
    ----------
    folder : LogFolder or None
        Owns the file; without one, and where no file can be made, nothing is kept.
    limit : int
        How much the notebook shows.
    so_far : iterable of (rank, item)
        What has come until now.
    """

    def __init__(self, folder: LogFolder | None, limit: int, so_far: Iterable[tuple[int, Item]]) -> None:
        self.path = ""
        self._size = 0
        self._files = 0
        self._last: int | None = None
        self.notice = f"the cell printed more than {size_text(limit)}; "
        """The line for the user."""
        try:
            if folder is not None:
                self.path = folder.new_log()
        except OSError as error:
            self.notice += f"the rest is lost, since no file can be made for it: {error}"
            return
        if self.path:
            self.notice += f"all of it is in {self.path} until the kernel ends (copy it to keep it)"
        else:
            self.notice += "the rest is not kept"
        problem = next(filter(None, [self.write(rank, item) for rank, item in so_far]), "")
        if problem:
            self.notice += f"; {problem}"

    def write(self, rank: int, item: Item) -> str:
        """Append one arrival; return a line for the user if logging stops with it, else nothing."""
        if not self.path:
            return ""
        try:
            self._append(rank, item)
        except OSError as error:
            path, self.path = self.path, ""
            return f"what comes from now on is lost: {path} cannot be written to ({error.strerror})"
        if self._size > LARGEST_LOG:
            path, self.path = self.path, ""
            return f"what comes from now on is lost: {path} has {size_text(self._size)}, which is the most"
        return ""

    def _append(self, rank: int, item: Item) -> None:
        text = item.text if isinstance(item, Text) else self._described(item)
        if rank != self._last:
            text = f"[rank {rank}]\n{text}"
            self._last = rank
        data = text.encode("utf-8", "backslashreplace")
        with open(self.path, "ab") as file:
            file.write(data)
        self._size += len(data)

    def _described(self, item: Rich) -> str:
        """Return a display's text; what else it consists of goes into files beside the log."""
        lines = [str(item.data.get("text/plain", ""))]
        for kind, content in item.data.items():
            if kind != "text/plain":
                self._files += 1
                path = f"{self.path[: -len('.log')]}-{self._files}{_suffix(kind)}"
                data = _as_bytes(kind, content)
                with open(new_file(path), "wb") as file:
                    file.write(data)
                self._size += len(data)
                lines.append(f"({kind} is in {path})")
        return "\n".join(lines) + "\n"


def _suffix(kind: str) -> str:
    return mimetypes.guess_extension(kind) or (".json" if kind.endswith("json") else ".txt")


def _as_bytes(kind: str, content: Any) -> bytes:
    if isinstance(content, bytes):
        return content
    if not isinstance(content, str):
        return json.dumps(content, default=repr).encode()
    if kind.startswith("image/") and "xml" not in kind:
        with contextlib.suppress(ValueError):  # no base64: as it came
            return base64.b64decode(content, validate=True)
    return content.encode("utf-8", "backslashreplace")
