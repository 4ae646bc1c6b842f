"""F81: another user of the machine can read nothing of a session."""

from __future__ import annotations

import functools
import json
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

import nbparallel as nbp
from nbparallel.session import Session
from tests.harness.stores import names_of

NOBODY = 65534

pytestmark = pytest.mark.skipif(
    os.geteuid() != 0, reason="only root can become another user (setuid): run the tests as root to see it"
)


def as_another_user(make: Callable[[], dict[str, Callable[[], object]]]) -> dict[str, str]:
    """Try what `make` returns as another user; return what the system said to each, "it worked" at worst."""
    read, write = os.pipe()
    child = os.fork()
    if not child:
        said = {}
        try:
            os.setgroups([])
            os.setresgid(NOBODY, NOBODY, NOBODY)
            os.setresuid(NOBODY, NOBODY, NOBODY)
            for what, probe in make().items():
                try:
                    probe()
                    said[what] = "it worked"
                except OSError as error:
                    said[what] = type(error).__name__
            with os.fdopen(write, "w") as pipe:
                json.dump(said, pipe)
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        answer: dict[str, str] = json.load(pipe)
    os.waitpid(child, 0)
    return answer


def readings(paths: list[str]) -> dict[str, Callable[[], object]]:
    """Return what reads these files and folders."""
    probes: tuple[Callable[[str], object], ...] = (lambda path: Path(path).read_bytes(), os.listdir)
    return {path: functools.partial(probes[path.endswith("/fd")], path) for path in paths}


@pytest.fixture(params=[0o000, 0o077])
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    """Set the user's umask."""
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


@pytest.mark.slow
def test_f81_nothing_can_be_read(umask: int, tmp_path: Path) -> None:
    """Segments, descriptors, environment, memory: refused, whatever the umask."""
    folder = tmp_path / "chosen"
    folder.mkdir()
    os.chmod(folder, 0o777)
    for parent in [folder, *folder.parents][:-1]:
        os.chmod(parent, os.stat(parent).st_mode | 0o055)  # let the other user come so far
    nbp.set_sharing_strategy("mmap", directory=folder)
    kinds = ("file_system", "mmap", "file_descriptor")
    arrays = [nbp.share(np.ones(50_000), strategy=kind) for kind in kinds]
    with Session(2) as session:
        session.run(
            "[x.sum() for x in arrays]; mine = [nbp.share(np.ones(9), strategy=kind) for kind in kinds[:2]]",
            namespace={"arrays": arrays, "np": np, "kinds": kinds},
        )
        names = names_of(os.getpid(), ["/dev/shm", str(folder)])
        assert len(names) == 6
        for name in names:
            status = os.lstat(name)
            assert stat.S_ISREG(status.st_mode)
            assert stat.S_IMODE(status.st_mode) == 0o600
        seen = session.statistics()
        processes = [seen.supervisor_pid, seen.template_pid, *(rank.pid for rank in seen.ranks)]
        private = [f"/proc/{pid}/{what}" for pid in processes for what in ("environ", "fd", "maps", "mem")]
        said = as_another_user(lambda: readings([*names, *private]))
        assert set(said.values()) == {"PermissionError"}, said
    nbp.set_sharing_strategy("file_descriptor")
    del arrays
    nbp.sharing.current_store().drain()


def test_f81_the_test_itself_can_read_what_is_open(tmp_path: Path) -> None:
    """The probe works: what everybody may read is read."""
    assert as_another_user(lambda: readings(["/etc/passwd"])) == {"/etc/passwd": "it worked"}
