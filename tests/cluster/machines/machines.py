"""Machines: namespaces of this one, each with its own network, processes, host name, /tmp and /dev/shm.

Some facts (unshare(1), nsenter(1), pid_namespaces(7), veth(4)):

* when the first process of a PID namespace ends, the kernel kills every other one: that is a power cut;
* a network namespace that has no name goes with its last process, and with it its end of each cable, which
  takes the other end along: if the tests are killed, nothing stays;
* a process that ignores SIGCHLD leaves no zombies, also of processes that it has inherited;
* ``/proc/PID/root`` shows a mount namespace from outside.

The tests' own process has one more cable, and the address .1: it is the machine where people log in.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Self

from nbparallel.testing.waiting import wait_until

ROOT = Path(__file__).resolve().parents[3]
_BOOT = """
hostname "$1"; shift
number=3; for kept in "$@"; do eval "exec $number<'$kept'"; number=$((number + 1)); done
for hidden in /tmp /dev/shm /run; do mount -t tmpfs -o mode=1777 nbp $hidden; done
mount -t tmpfs -o mode=755 nbp /root
number=3; for kept in "$@"; do
    mkdir -p "$kept"; mount -c --bind /proc/self/fd/$number "$kept"; number=$((number + 1))
done
ip link set lo up
echo up; exec env --ignore-signal=CHLD sleep infinity
"""
"""What a machine does first; what this checkout needs of hidden folders is mounted there again."""
HIDDEN = ("/tmp/", "/root/")
"""Folders that every machine has for itself; /root as well: other users' jobs reach a Python in it."""
_ALONE = ["--net", "--uts", "--ipc", "--mount", "--pid"]
DAEMONS = ("munged", "slurmctld", ": slurmscriptd", "slurmd", "/usr/sbin/sshd", "sshd")
LEFT_SECONDS = 60.0
FREE = range(1, 100)
"""Networks 10.78.N.0/24 that may be used."""


def missing_reason(*programs: str) -> str | None:
    """Return why there can be no machines with these programs here, or None."""
    if os.getuid():
        return "only root makes machines of namespaces"
    missing = [name for name in ("ip", "nsenter", *programs) if shutil.which(name) is None]
    if missing:
        return f"missing: {', '.join(missing)}; .ci/run installs Debian's packages"
    tried = subprocess.run(
        ["unshare", *_ALONE, "--fork", "--mount-proc", "mount", "-t", "tmpfs", "nbp", "/tmp"],
        capture_output=True, text=True, timeout=20, check=False,
    )  # fmt: skip
    return f"no namespaces can be made: {tried.stderr.strip()}" if tried.returncode else None


def _run(*words: str) -> str:
    done = subprocess.run(words, capture_output=True, text=True, timeout=30, check=False)
    if done.returncode:
        raise OSError(f"{' '.join(words)}: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout


def _kept_folders() -> list[str]:
    """Return what lies in hidden folders and is used on every machine: this checkout, its environment."""
    folders = {str(ROOT), sys.prefix, sys.base_prefix, *os.environ.get("PYTHONPATH", "").split(os.pathsep)}
    return sorted(folder for folder in folders if folder.startswith(HIDDEN) and Path(folder).is_dir())


class Machine:
    """One of them: runs until `cut_power`."""

    def __init__(self, name: str, address: str) -> None:
        self.name, self.address = name, address
        self._holder: subprocess.Popen[str] | None = None

    def boot(self) -> None:
        """Start it, with nothing but an init process; it has no network yet."""
        words = [
            "setpriv",
            "--pdeathsig",
            "KILL",
            "unshare",
            *_ALONE,
            "--fork",
            "--kill-child",
            "--mount-proc",
        ]
        words += ["sh", "-euc", _BOOT, "sh", self.name, *_kept_folders()]
        self._holder = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
        assert self._holder.stdout is not None
        assert self._holder.stdout.readline() == "up\n", f"{self.name} does not boot"
        holder = self._holder.pid
        self.init = int(Path(f"/proc/{holder}/task/{holder}/children").read_text())

    def prefix(self, *, network_only: bool = False) -> list[str]:
        """Return the words before a command that runs on it."""
        return ["nsenter", "-t", str(self.init), *(["--net"] if network_only else _ALONE)]

    def run(self, *words: str) -> str:
        """Run a command on it; return what it printed."""
        return _run(*self.prefix(), *words)

    def start(self, *words: str, log: Path) -> None:
        """Start a daemon on it, which ends with it."""
        with log.open("ab") as file:
            subprocess.Popen(
                [*self.prefix(), "setsid", "--fork", *words],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
            ).wait()

    def processes(self) -> dict[int, str]:
        """Return the command lines of all its processes but init, by their PIDs out here."""
        mine, found = self._space(self.init), {}
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                if entry.name.isdigit() and self._space(int(entry.name)) == mine:
                    line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                    found[int(entry.name)] = line
        found.pop(self.init, None)
        return found

    @staticmethod
    def _space(pid: int) -> str:
        return os.readlink(f"/proc/{pid}/ns/pid")

    def shared_names(self) -> list[str]:
        """Return what is in its /dev/shm."""
        return sorted(os.listdir(f"/proc/{self.init}/root/dev/shm"))

    def cut_power(self) -> None:
        """End it, and with it everything that runs on it; idempotent."""
        if self._holder is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.init, 9)
            self._holder.kill()
            self._holder.communicate()
            self._holder = None


class Network:
    """Machines with these names behind one bridge, which is on the first of them; a context manager.

    `home` is a folder that all machines share, as people's home directories are.
    """

    def __init__(self, *names: str) -> None:
        self.home = Path(tempfile.mkdtemp(prefix="nbp-home-", dir="/var/tmp"))
        self.home.chmod(0o755)
        self.machines: dict[str, Machine] = {}
        try:
            self._lay(names)
        except BaseException:
            self.stop()
            raise

    def _lay(self, names: tuple[str, ...]) -> None:
        hub = self.machines[names[0]] = Machine(names[0], "")
        hub.boot()
        for number in FREE:
            try:  # its name keeps others from the same network
                _run(
                    "ip",
                    "link",
                    "add",
                    f"nbp{number}",
                    "type",
                    "veth",
                    "peer",
                    "name",
                    "login",
                    "netns",
                    str(hub.init),
                )
                break
            except OSError:
                if number == FREE[-1]:
                    raise
        self._base = f"10.78.{number}"
        self.address = f"{self._base}.1"
        hub.address = f"{self._base}.2"
        _run("ip", "address", "add", f"{self.address}/24", "dev", f"nbp{number}")
        _run("ip", "link", "set", f"nbp{number}", "up")
        hub.run("ip", "link", "add", "bridge", "type", "bridge")
        hub.run("ip", "link", "set", "login", "master", "bridge", "up")
        hub.run("ip", "address", "add", f"{hub.address}/24", "dev", "bridge")
        hub.run("ip", "link", "set", "bridge", "up")
        for index, name in enumerate(names[1:]):
            self.machines[name] = Machine(name, f"{self._base}.{10 + index}")
            self.boot(name)
        self._hub = hub

    def boot(self, name: str) -> None:
        """Start a machine, and connect it."""
        machine, hub = self.machines[name], next(iter(self.machines.values()))
        machine.boot()
        inside = [*machine.prefix(), "ip"]
        cable = [*hub.prefix(network_only=True), "ip", "link"]
        _run(*cable, "add", f"to-{name}", "type", "veth", "peer", "name", "eth0", "netns", str(machine.init))
        _run(*cable, "set", f"to-{name}", "master", "bridge", "up")
        _run(*inside, "address", "add", f"{machine.address}/24", "dev", "eth0")
        _run(*inside, "link", "set", "eth0", "up")
        _run(*inside, "route", "add", "default", "via", self.address)  # Dask asks it for a machine's address

    def set_link(self, name: str, state: str) -> None:
        """Have the cable of a machine be ``up`` or ``down``."""
        self._hub.run("ip", "link", "set", f"to-{name}", state)

    def reboot(self, name: str) -> None:
        """Have a machine lose its power, and start anew, empty."""
        self.machines[name].cut_power()
        with contextlib.suppress(OSError):  # it goes by itself, a moment later
            self._hub.run("ip", "link", "delete", f"to-{name}")
        self.boot(name)

    def left(self, *names: str) -> dict[str, list[str]]:
        """Return what is on machines, by default all: processes but daemons, and names in /dev/shm."""
        found = {}
        for name in names or self.machines:
            machine = self.machines[name]
            lines = [line for line in machine.processes().values() if not line.startswith(DAEMONS)]
            if seen := [*lines, *machine.shared_names()]:
                found[name] = seen
        return found

    def await_nothing_left(self, *names: str) -> None:
        """Wait until machines, by default all, have nothing left; a test promises how soon that is."""
        wait_until(lambda: not self.left(*names), lambda: self.left(*names), seconds=LEFT_SECONDS)

    def stop(self) -> None:
        """End every machine, and remove the shared folder; idempotent."""
        for machine in reversed(self.machines.values()):
            machine.cut_power()
        shutil.rmtree(self.home, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
