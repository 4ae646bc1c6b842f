"""What dead and living sessions leave in a directory: names, some of them locked."""

from __future__ import annotations

import os
from pathlib import Path

from nbparallel.wire import locked_names

NOBODY = 65534
_held: list[int] = []


def release() -> None:
    """Give up what a test has locked."""
    while _held:
        os.close(_held.pop())


def leave(folder: Path, count: int = 1, number: int = 1, *, living: bool = False) -> list[Path]:
    """Make names as a process would, which has ended, or lives; return the names."""
    letters = locked_names.LETTERS
    paths = [
        folder / f"{locked_names.stem(4242, number)}_{letters[i & 31]}{letters[i >> 5 & 31]}"
        for i in range(count)
    ]
    for path in paths:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        if living and not locked_names.hold(fd):
            os.close(fd)
            raise InterruptedError(f"a sweep was quicker than this test: {path}")
        if living:
            _held.append(fd)
        os.write(fd, b"x" * 5000)
        if not living:
            os.close(fd)
    return paths


def left_in(folder: Path) -> set[str]:
    """Return all file names in a folder."""
    return {path.name for path in folder.iterdir()}
