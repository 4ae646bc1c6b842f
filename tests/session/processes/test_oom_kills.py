"""F6: was a rank killed because memory ran out?  The system's own count says so."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from nbparallel.session.processes.rank_handle import RankDeath, describe_death
from nbparallel.session.processes.supervisor_client import OomKillCounter

V2 = {
    "/proc/self/cgroup": "0::/box\n",
    "/proc/self/mountinfo": "31 23 0:28 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n",
}
V1 = {
    "/proc/self/cgroup": "4:memory:/box\n0::/\n",
    "/proc/self/mountinfo": "35 31 0:32 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n",
}
PLACES: dict[str, tuple[Mapping[str, str], str, str]] = {
    "a container": (V2, "/sys/fs/cgroup/box/memory.events", "low 0\noom 9\noom_kill {}\noom_group_kill 0\n"),
    "the whole of cgroup v2": (V2, "/sys/fs/cgroup/memory.events", "oom_kill {}\n"),
    "an older container": (V1, "/sys/fs/cgroup/memory/box/memory.oom_control", "under_oom 0\noom_kill {}\n"),
    "the machine": ({}, "/proc/vmstat", "nr_free_pages 7\noom_kill {}\n"),
}


class Counted:
    """Files of an imaginary machine that counts out-of-memory kills in one of them."""

    def __init__(self, files: Mapping[str, str], path: str, text: str) -> None:
        self._files, self._path, self._text = files, path, text
        self.kills = 3

    def read(self, path: str) -> str:
        """Return a file's text."""
        if path == self._path:
            return self._text.format(self.kills)
        if path in self._files:
            return self._files[path]
        raise FileNotFoundError(path)


@pytest.mark.parametrize("where", PLACES)
def test_f6_a_kill_that_the_system_counted_is_explained_once(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A count that rose explains as many deaths as it rose by, and says whose it is, without a path."""
    machine = Counted(*PLACES[where])
    kills = OomKillCounter(machine.read)
    assert kills.explain() == ""
    machine.kills = 5
    for _ in range(2):
        text = kills.explain()
        assert "because memory ran out" in text
        whose = "this machine's" if where == "the machine" else "this container's"
        assert f"({whose} count of such kills has risen)" in text
        assert "/" not in text
    assert kills.explain() == ""
    machine.kills = 6
    monkeypatch.setattr("nbparallel.session.processes.supervisor_client.POLL_SECONDS", 0.0)
    kills.poll()  # somebody else's, before this cell
    assert kills.explain() == ""


def test_f6_without_a_count_nothing_is_claimed() -> None:
    """Where the system says nothing, a killed rank may still have been killed by hand."""

    def nothing(path: str) -> str:
        raise PermissionError(path)

    kills = OomKillCounter(nothing)
    assert kills.explain() == ""
    death = RankDeath(7, -9, 0.0, reason=kills.explain())
    assert describe_death(death) == "was killed by SIGKILL: by hand, or by the system because memory ran out"
