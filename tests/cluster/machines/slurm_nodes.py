"""A Slurm cluster of two nodes, on machines of namespaces: Debian's slurmctld, slurmd and munge."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator

from nbparallel.testing.waiting import wait_until
from tests.cluster.machines.machines import Network

PROGRAMS = ("slurmctld", "slurmd", "squeue", "munged", "setpriv", "unshare")
NODES = ("n1", "n2")
CPUS = 2
UP_SECONDS = 40.0
MEMORY_CGROUPS = "/sys/fs/cgroup/memory"
_CONFIGURATION = """
ClusterName=test
SlurmctldHost=ctl({controller})
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={home}/munge.socket
ProctrackType=proctrack/linuxproc
TaskPlugin={task}
ReturnToService=2
SlurmctldPidFile={home}/ctld.pid
SlurmdPidFile={home}/slurmd-%n.pid
SlurmdSpoolDir={home}/spool-%n
StateSaveLocation={home}/state
SchedulerType=sched/builtin
SelectType=select/cons_tres
SelectTypeParameters={what}
MpiDefault=none
PartitionName=p Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


class SlurmNodes(Network):
    """A controller and two nodes; jobs are submitted from the tests' own machine.

    Parameters
    ----------
    memory : bool
        Whether a job has no more memory than it asked for.
    """

    def __init__(self, *, memory: bool = False) -> None:
        super().__init__("ctl", *NODES)
        try:
            self._configure(memory)
            self._start()
        except BaseException:
            self.stop()
            raise

    def _configure(self, memory: bool) -> None:
        for folder in ("state", *(f"spool-{node}" for node in NODES)):
            (self.home / folder).mkdir()
        (self.home / "jobs").mkdir(mode=0o777)
        (self.home / "jobs").chmod(0o777)
        (self.home / "munge.key").touch(0o600)
        (self.home / "munge.key").write_bytes(os.urandom(1024))
        text = _CONFIGURATION.format(
            controller=self.machines["ctl"].address, home=self.home,
            task="task/cgroup" if memory else "task/none", what="CR_CPU_Memory" if memory else "CR_CPU",
        )  # fmt: skip
        for node in NODES:
            text += f"NodeName={node} NodeAddr={self.machines[node].address} CPUs={CPUS} RealMemory=4000\n"
        (self.home / "slurm.conf").write_text(text)
        if memory:
            (self.home / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\nConstrainRAMSpace=yes\n")
        self.environment = {"SLURM_CONF": str(self.home / "slurm.conf")}
        """Of what is to use it."""

    def _start(self) -> None:
        home, controller = self.home, self.machines["ctl"]
        munge = [
            f"--{what}={home}/munge.{what.partition('-')[0]}"
            for what in ("key-file", "pid-file", "seed-file")
        ]
        controller.start(
            "munged",
            "--foreground",
            "--force",
            *munge,
            f"--socket={home}/munge.socket",
            log=home / "munged.log",
        )
        wait_until((home / "munge.socket").exists, (home / "munged.log").read_text, seconds=UP_SECONDS)
        controller.start("slurmctld", "-D", "-f", f"{home}/slurm.conf", log=home / "ctld.log")
        for node in NODES:
            self.start_node(node)
        wait_until(lambda: self.states() == ["idle"] * len(NODES), self.log, seconds=UP_SECONDS)

    def start_node(self, node: str) -> None:
        """Start Slurm on a machine that has booted."""
        self.machines[node].start(
            "slurmd", "-D", "-N", node, "-f", f"{self.home}/slurm.conf", log=self.home / f"{node}.log"
        )

    def stop(self) -> None:
        """End everything, and remove what Slurm has made of cgroups."""
        super().stop()
        for node in NODES:
            for folder, *_ in os.walk(f"{MEMORY_CGROUPS}/slurm_{node}", topdown=False):
                os.rmdir(folder)

    def log(self) -> str:
        """Return what its daemons have said last."""
        return "\n".join(file.read_text()[-2000:] for file in sorted(self.home.glob("*.log")))

    def say(self, *words: str) -> str:
        """Run one of Slurm's commands; return what it printed, or what went wrong."""
        environment = {**os.environ, **self.environment}
        done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=30, check=False)
        return (done.stdout or done.stderr).strip()

    def states(self) -> list[str]:
        """Return the states of its nodes."""
        return self.say("sinfo", "-h", "-N", "-o", "%t").split()

    def jobs(self) -> dict[str, tuple[str, str]]:
        """Return the state of each job that has not ended, and its node."""
        rows = (line.split("|") for line in self.say("squeue", "-h", "-o", "%i|%T|%N").splitlines())
        return {number: (state, node) for number, state, node in rows}

    @contextlib.contextmanager
    def drained(self, *nodes: str) -> Iterator[None]:
        """Have nodes take no new jobs."""
        for node in nodes:
            self.say("scontrol", "update", f"node={node}", "state=drain", "reason=test")
        yield
        for node in nodes:
            self.say("scontrol", "update", f"node={node}", "state=resume")

    def job_on(self, node: str) -> str:
        """Return the number of the job that runs on a node."""
        return next(number for number, job in self.jobs().items() if job == ("RUNNING", node))

    def end_jobs(self) -> None:
        """End all jobs, also those that a test has left."""
        for job in self.jobs():
            self.say("scancel", job)
        self.await_nothing_left()
