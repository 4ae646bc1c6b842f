"""Sandboxes: scripts that run where memory, a disk or the number of processes is nearly used up.

Some facts (mount_namespaces(7), tmpfs(5), cgroups(7)):

* a process in a mount namespace of its own may mount a tiny tmpfs over /dev/shm or any folder, which no
  process outside sees; with a user namespace this takes no privilege, where the system allows that at all;
* a cgroup may be made by a process that may write to the cgroup's folder: one of root, or of
  a user that it was delegated to;
* a cgroup's folder can be removed once its last process has ended.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path

_MOUNT = 'mount -t tmpfs -o "size=$1,$2" nbp "$3" && shift 3 && exec "$@"'
_ENTER = 'echo $$ > "$1" && shift && exec "$@"'


def missing_reason() -> str | None:
    """Return why no tmpfs can be mounted in a namespace here, or None."""
    try:
        done = subprocess.run(
            ["unshare", "-Urm", "sh", "-c", "mount -t tmpfs -o size=64k nbp /tmp"],
            capture_output=True,
            text=True,
            timeout=10,
            check=False,
        )
    except OSError as error:
        return f"unshare cannot be run: {error}"
    return None if done.returncode == 0 else f"unshare -Urm is not permitted: {done.stderr.strip()}"


def on_small_tmpfs(folder: Path | str, size: str, options: str = "mode=1777") -> list[str]:
    """Return the words before a command that make `folder` a tmpfs of this size for it alone."""
    return ["unshare", "-Urm", "sh", "-c", _MOUNT, "sh", size, options, str(folder)]


def run_script(
    script: str, before: Sequence[str] = (), *, timeout: float = 60.0
) -> subprocess.CompletedProcess[str]:
    """Run Python source in a process of its own, behind the words `before`; return what came of it."""
    words = [*before, sys.executable, "-c", textwrap.dedent(script)]
    return subprocess.run(words, capture_output=True, text=True, timeout=timeout, check=False)


@contextlib.contextmanager
def memory_cgroup(nbytes: int) -> Iterator[list[str] | str]:
    """Make a memory cgroup with a limit; give the words that run a command in it, or why there is none."""
    with _cgroup("memory", ("memory.limit_in_bytes", "memory.max"), nbytes) as words:
        yield words


@contextlib.contextmanager
def process_cgroup(count: int) -> Iterator[list[str] | str]:
    """Make a cgroup that may have `count` processes and threads; gives what `memory_cgroup` does."""
    with _cgroup("pids", ("pids.max", "pids.max"), count) as words:
        yield words


@contextlib.contextmanager
def _cgroup(controller: str, limits: tuple[str, str], most: int) -> Iterator[list[str] | str]:
    made = _make_cgroup(controller, limits, most)
    if isinstance(made, str):
        yield made
        return
    try:
        yield ["sh", "-c", _ENTER, "sh", str(made / "cgroup.procs")]
    finally:
        made.rmdir()


def _make_cgroup(controller: str, limits: tuple[str, str], most: int) -> Path | str:
    """Return the folder of a new cgroup; `limits`: the file with its limit, in version 1 and 2."""
    for root, limit in zip((Path("/sys/fs/cgroup", controller), _own_v2()), limits, strict=True):
        folder = root / f"nbp-test-{os.getpid()}"
        try:
            folder.mkdir()
        except OSError as error:
            reason = f"no {controller} cgroup can be made: {error}"
            continue
        try:
            (folder / limit).write_text(str(most))
        except OSError as error:
            folder.rmdir()
            reason = f"a cgroup's {controller} cannot be limited here: {error}"
            continue
        return folder
    return reason


def _own_v2() -> Path:
    """Return the folder of this process's cgroup in the unified hierarchy (cgroups(7))."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        if line.startswith("0::"):
            return Path("/sys/fs/cgroup", line[4:])
    return Path("/sys/fs/cgroup")


PLACES = ("/dev/shm", "/var/tmp")


def on_private_places(size: str = "64m") -> list[str]:
    """Return the words before a command that give it places of its own, each of this size."""
    return [word for place in PLACES for word in on_small_tmpfs(place, size)] + ["env", "TMPDIR=/var/tmp"]
