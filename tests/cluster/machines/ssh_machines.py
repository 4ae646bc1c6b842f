"""Two machines with sshd, and keys made for them."""

from __future__ import annotations

import os
import subprocess

from tests.cluster.machines.machines import Network

PROGRAMS = ("/usr/sbin/sshd", "ssh-keygen", "setpriv", "unshare")
MACHINES = ("s1", "s2")
_CONFIGURATION = """
HostKey {home}/host
AuthorizedKeysFile {home}/user.pub
PermitRootLogin yes
StrictModes no
UsePAM no
PidFile none
SetEnv PYTHONPATH={path}
"""


class SshMachines(Network):
    """Machines that let the owner of `key` in, as root."""

    def __init__(self) -> None:
        super().__init__("hub", *MACHINES)
        try:
            for name in ("host", "user"):
                words = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", f"{self.home}/{name}"]
                subprocess.run(words, check=True, timeout=20)
            self.key = str(self.home / "user")
            text = _CONFIGURATION.format(home=self.home, path=os.environ.get("PYTHONPATH", ""))
            (self.home / "sshd").write_text(text)
            for name in MACHINES:
                self.start_daemon(name)
        except BaseException:
            self.stop()
            raise

    def start_daemon(self, name: str) -> None:
        """Start sshd on a machine that has booted."""
        self.machines[name].run("mkdir", "-p", "/run/sshd")
        self.machines[name].run("/usr/sbin/sshd", "-f", f"{self.home}/sshd")
