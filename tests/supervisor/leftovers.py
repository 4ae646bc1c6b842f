"""What dead and living sessions leave in a directory: names, records, owners."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from nbparallel.wire import owners
from nbparallel.wire.identity import Process, this_process, this_world
from nbparallel.wire.owners import Owner

WORLD, ME = this_world(), this_process()
NOBODY = 65534
LETTERS = "abcdefghijklmnopqrstuvwxyz234567"


def dead_process() -> Process:
    """Return a process that has ended."""
    with subprocess.Popen([sys.executable, "-c", ""]) as child:
        pass
    return Process(child.pid, 1)


DEAD = dead_process()


def owner(*processes: Process, **changes: object) -> Owner:
    """Return an owner in this world, with changes to it."""
    return Owner(replace(WORLD, **changes), processes[0], processes)  # type: ignore[arg-type]


def token(number: int) -> str:
    """Return a token of ten letters for a number."""
    return "".join(LETTERS[number >> 5 * i & 31] for i in range(10))


def leave(folder: Path, who: Owner | str | None, count: int = 1, number: int = 1) -> list[Path]:
    """Make names and their record as a process would; return the names."""
    stem = f"nbp_{token(number)}"
    if isinstance(who, Owner):
        owners.write(str(folder / f"{stem}.owner"), who)
    elif who is not None:
        (folder / f"{stem}.owner").symlink_to(who) if who else None
    paths = [folder / f"{stem}_{LETTERS[i & 31]}{LETTERS[i >> 5 & 31]}" for i in range(count)]
    for path in paths:
        path.write_bytes(b"x" * 5000)
        path.chmod(0o600)
    return paths


def left_in(folder: Path) -> set[str]:
    """Return all file names in a folder."""
    return {path.name for path in folder.iterdir()}


@pytest.fixture(autouse=True)
def _no_pointers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave nothing where other sessions look."""
    monkeypatch.setattr(owners, "pointer_path", lambda record: "")
