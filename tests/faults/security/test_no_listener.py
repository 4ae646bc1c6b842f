"""F80, F85: there is no door to a session, and nothing that would open one lies about."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

import nbparallel as nbp
from nbparallel.session import Session
from nbparallel.session.monitoring.activity import SessionStatistics
from tests.faults.security.test_other_users import as_another_user
from tests.harness.ranks import rank_pool

LISTENS = 0x10000
"""``__SO_ACCEPTCON``, in the flags of /proc/net/unix (unix(7))."""
SECRET = "hunter2-correct-horse"


def all_processes(seen: SessionStatistics) -> list[int]:
    """Return supervisor, template and ranks."""
    return [seen.supervisor_pid, seen.template_pid, *(rank.pid for rank in seen.ranks)]


def sockets(pid: int | str) -> set[int]:
    """Return the inodes of a process's sockets."""
    found = set()
    for name in os.listdir(f"/proc/{pid}/fd"):
        try:
            target = os.readlink(f"/proc/{pid}/fd/{name}")
        except OSError:
            continue  # closed meanwhile
        if target.startswith("socket:["):
            found.add(int(target[8:-1]))
    return found


def doors(inodes: set[int]) -> list[str]:
    """Return those of these sockets that somebody could come in by: of a network, named, or listening."""
    found = []
    for kind in ("tcp", "tcp6", "udp", "udp6", "raw", "raw6"):
        try:
            lines = Path(f"/proc/net/{kind}").read_text().splitlines()[1:]
        except OSError:
            continue  # no such protocol here
        found += [f"{kind} {line.split()[1]}" for line in lines if int(line.split()[9]) in inodes]
    for line in Path("/proc/net/unix").read_text().splitlines()[1:]:
        fields = line.split()
        if int(fields[6]) in inodes and (len(fields) > 7 or int(fields[3], 16) & LISTENS):
            found.append(f"unix {' '.join(fields[7:]) or 'listens'}")
    return found


@pytest.mark.slow
@pytest.mark.parametrize("start_method", ["forkserver", "spawn"])
def test_f80_nothing_listens_and_nothing_has_a_name(start_method: str) -> None:
    """Of all sockets of kernel, supervisor, template and ranks none can be connected to."""
    before = sockets("self")
    with Session(2, start_method=start_method) as session:
        session.run("send(rank, 1 - rank); recv(src=1 - rank); all_reduce(rank)")
        pids = [pid for pid in all_processes(session.statistics()) if pid]
        ours = (sockets("self") - before).union(*map(sockets, pids))
        assert len(ours) >= 6, "the sockets were found"
        assert doors(ours) == []


def test_f80_the_test_itself_sees_a_door(tmp_path: Path) -> None:
    """A port, a name, an abstract name and an unnamed listener are all found."""
    with (
        socket.create_server(("127.0.0.1", 0)),
        socket.socket(socket.AF_UNIX) as named,
        socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as abstract,
    ):
        named.bind(str(tmp_path / "door"))
        abstract.bind(f"\0nbp-test-{os.getpid()}")
        abstract.listen()
        found = doors(sockets("self"))
    assert [door.split()[0] for door in found if "nbp-test" in door or "door" in door] == ["unix", "unix"]
    assert any(door.startswith("tcp 0100007F:") for door in found)


def probes(pid: int) -> dict[str, Callable[[], object]]:
    """Return what another user may try to get at a process, or into it."""
    libc = ctypes.CDLL(None, use_errno=True)

    def call(name: str, *arguments: object) -> None:
        if getattr(libc, name)(*arguments) < 0:
            raise OSError(ctypes.get_errno(), name)

    pidfd = os.pidfd_open(pid)  # anybody may have one: it is a number with certainty, no right
    attach, one, none = 0x4206, ctypes.c_ulong(1), ctypes.c_ulong(0)
    room = ctypes.create_string_buffer(8)
    ours, theirs = (ctypes.c_void_p * 2)(ctypes.addressof(room), 8), (ctypes.c_void_p * 2)(1 << 22, 8)
    return {
        "its descriptors": lambda: os.listdir(f"/proc/{pid}/fd"),
        "one of them": lambda: os.open(f"/proc/{pid}/fd/3", os.O_RDWR),
        "a copy of one": lambda: call("syscall", 438, pidfd, 3, 0),
        "its memory": lambda: os.open(f"/proc/{pid}/mem", os.O_RDWR),
        "reading its memory": lambda: call("process_vm_readv", pid, ours, one, theirs, one, none),
        "tracing it": lambda: call("ptrace", attach, pid, None, None),
        "its environment": lambda: os.open(f"/proc/{pid}/environ", os.O_RDONLY),
        "its mappings": lambda: os.listdir(f"/proc/{pid}/map_files"),
        "a signal": lambda: os.kill(pid, signal.SIGUSR1),
        "a signal by pidfd": lambda: signal.pidfd_send_signal(pidfd, signal.SIGTERM),
    }


@pytest.mark.slow
@pytest.mark.skipif(
    os.geteuid() != 0, reason="only root can become another user (setuid): run the tests as root to see it"
)
def test_f80_ten_ways_in_are_refused_to_another_user() -> None:
    """Files, memory, descriptors, tracing, signals: whatever is tried on any process of a session."""
    with Session(1) as session:
        pids = all_processes(session.statistics())
        said = as_another_user(
            lambda: {f"{what} of {pid}": probe for pid in pids for what, probe in probes(pid).items()}
        )
        assert len(said) == 10 * len(pids)
        assert set(said.values()) == {"PermissionError"}, said
        assert session.run("rank").values == [0]


def uncovered(pid: int | str) -> list[str]:
    """Return shared mappings of a process that would be in its core file (proc_pid_smaps(5), ``dd``)."""
    found, name = [], ""
    for line in Path(f"/proc/{pid}/smaps").read_text(errors="replace").splitlines():
        fields = line.split()
        if not fields[0].endswith(":"):
            name = " ".join(fields[5:])
        elif fields[0] == "VmFlags:" and "memfd:nbp" in name and "dd" not in fields:
            found.append(name)
    return found


@pytest.mark.slow
def test_f85_secrets_do_not_get_about(monkeypatch: pytest.MonkeyPatch) -> None:
    """A token of the notebook's environment or variables is in no command line, log or core file of ours."""
    monkeypatch.setenv("NBP_TEST_TOKEN", SECRET)
    names = {"token": SECRET, "x": nbp.zeros(1 << 20, "u1")}
    with Session(2) as session:
        inside = session.run(
            "import os, subprocess\nassert os.environ['NBP_TEST_TOKEN'] == token and x.sum() == 0\n"
            "send(token, 1 - rank); recv(src=1 - rank)\n"
            "subprocess.run(['env', '-0'], capture_output=True).stdout",
            namespace=names,
        ).values
        pids = all_processes(session.statistics())
        for pid in pids:
            assert SECRET.encode() not in Path(f"/proc/{pid}/cmdline").read_bytes()
        assert SECRET not in rank_pool(session).supervisor.log()
        for pid in ["self", *pids[2:]]:
            assert "memfd:nbp" in Path(f"/proc/{pid}/maps").read_text(), "there is shared memory"
            assert uncovered(pid) == []
        # what a child of a rank gets beyond the notebook's own environment: marks and numbers, no keys
        ours = set(os.environ) | {"_"}
        for text in inside:
            variables = dict(line.split(b"=", 1) for line in text.split(b"\0") if line)
            added = {name.decode() for name in variables} - ours
            assert added <= {
                "NBP_SESSION", "NBP_CLIENT", "NBP_OWNER", "RANK", "LOCAL_RANK", "WORLD_SIZE",
                "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT", "PYTHONHASHSEED",
                "OMP_NUM_THREADS", "NUMBA_NUM_THREADS", "POLARS_MAX_THREADS", "VECLIB_MAXIMUM_THREADS",
                "LINES", "COLUMNS",  # GNU readline's, which pdb imports on CPython 3.13
            }, added  # fmt: skip
            with socket.socket() as sock:
                sock.bind(("127.0.0.1", int(variables[b"MASTER_PORT"])))  # no program listens there
