"""F74: containers and systems that lack something: it works, or one clear message says what is missing."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.harness.sandboxes import missing_reason, on_small_tmpfs, run_script

ALL_STRATEGIES = """
import os, numpy as np, nbparallel as nbp
y = np.arange(1000.0)
with nbp.Session(2) as session:
    assert session.run("all_reduce(rank)").values == [1, 1]
    for kind in {kinds}:
        x = nbp.share(np.ones(200_000), strategy=kind)
        source = "x[rank] = 5.0; float(x.sum())"
        assert session.run(source, ranks=[0], namespace=dict(x=x)).values[0] == 200_004
        del x
    assert session.run("y.sum()", namespace=dict(y=y)).values == [y.sum()] * 2
print("fine", os.getpid())
"""


def run_in(before: Sequence[str], script: str, *, status: int = 0) -> subprocess.CompletedProcess[str]:
    """Run a script behind the words `before`; skip, with the reason, where such places cannot be made."""
    reason = missing_reason()
    if reason is not None:
        pytest.skip(reason)
    done = run_script(script, before)
    assert done.returncode == status, done.stdout + done.stderr
    return done


def script(*kinds: str) -> str:
    """Return a script that uses these strategies."""
    return ALL_STRATEGIES.format(kinds=kinds)


@pytest.mark.slow
@pytest.mark.time_limit(60)
def test_f74_the_first_process_of_a_container_with_64_mb() -> None:
    """No init, root, pid 1, Docker's /dev/shm: everything works, and no process is left when it ends."""
    before = ["unshare", "-Urmp", "--fork", "--mount-proc", "--kill-child", "sh", "-c"]
    before += ['mount -t tmpfs -o size=64m nbp /dev/shm && exec "$@"', "sh"]
    done = run_in(before, script("file_descriptor", "file_region", "file_system", "mmap"))
    assert done.stdout.split() == ["fine", "1"]
    assert done.stderr == ""


@pytest.mark.slow
@pytest.mark.time_limit(60)
def test_f74_a_read_only_dev_shm() -> None:
    """Anonymous memory and files on a disk work; named memory says why it does not."""
    text = script("file_descriptor", "file_region", "mmap") + (
        "print(nbp.get_all_sharing_strategies().missing['file_system'])\n"
        "try: nbp.share(y, strategy='file_system')\n"
        "except nbp.errors.StrategyUnavailableError as error: print(error)\n"
    )
    before = on_small_tmpfs("/dev/shm", "64k", "ro")
    done = run_in(before, text)
    assert done.stdout.startswith("fine")
    assert done.stdout.count("/dev/shm") == 2
    assert done.stderr == ""


@pytest.mark.slow
@pytest.mark.time_limit(60)
def test_f74_no_dev_shm(tmp_path: Path) -> None:
    """The same without the directory."""
    words = (
        "for f in null zero random urandom tty; do touch $0/$f; mount --bind /dev/$f $0/$f; done;"
        " ln -s /proc/self/fd $0/fd; mount --rbind $0 /dev"
    )
    before = ["unshare", "-Urm", "sh", "-c", f'mount -t tmpfs nbp $0 && {words} && exec "$@"', str(tmp_path)]
    text = script("file_descriptor", "file_region", "mmap") + (
        "print(nbp.get_all_sharing_strategies().missing['file_system'])\n"
    )
    done = run_in(before, text)
    assert "no directory /dev/shm" in done.stdout


@pytest.mark.slow
@pytest.mark.time_limit(60)
def test_f74_no_proc() -> None:
    """Ranks run and share what they may write; a read-only array, which needs /proc, is one clear error."""
    text = """
        import numpy as np, nbparallel as nbp
        with nbp.Session(2) as session:
            assert session.run("all_reduce(rank)").values == [1, 1]
            x = nbp.share(np.ones(1000))
            assert session.run("x.sum()", namespace=dict(x=x)).values == [1000.0] * 2
            try:
                session.run("y.sum()", namespace=dict(y=np.ones(1000)))
            except nbp.errors.ParallelError as error:
                print(error.errors[0])
            assert session.run("rank").values == [0, 1]
    """
    done = run_in(on_small_tmpfs("/proc", "64k"), text)
    assert done.stdout.count("/proc is not mounted here") == 1
    assert "nbp.share" in done.stdout
    assert done.stderr == ""


@pytest.mark.slow
@pytest.mark.time_limit(60)
@pytest.mark.parametrize(("call", "error"), [("memfd_create", "EPERM"), ("pidfd_open", "ENOSYS")])
def test_f74_a_system_call_is_refused(call: str, error: str) -> None:
    """A seccomp profile, an old kernel: ranks do not start, and one message says what is missing."""
    if shutil.which("strace") is None:
        pytest.skip("there is no strace")
    text = """
        import numpy as np, nbparallel as nbp
        x = nbp.zeros(1000)
        print(nbp.get_sharing_strategy(), nbp.is_shared(x))
        try:
            nbp.Session(2).start()
        except nbp.errors.StartError as error:
            print(error)
    """
    before = [
        "strace",
        "-f",
        "-qq",
        "-o",
        "/dev/null",
        "-e",
        f"trace={call}",
        "-e",
        f"inject={call}:error={error}",
    ]
    probe = subprocess.run([*before, sys.executable, "-c", ""], capture_output=True, text=True, check=False)
    if probe.returncode:
        pytest.skip(f"strace may not trace here: {probe.stderr.strip()}")
    done = run_script(text, before)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    strategy, shared, message = done.stdout.split(maxsplit=2)
    assert (strategy, shared) == ("file_system" if call == "memfd_create" else "file_descriptor", "True")
    assert f"the system refused {call}" in message
    assert "seccomp" in message
