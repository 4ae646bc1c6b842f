"""Views of a session on hosts: what every node sees of its ranks, with global numbers and the host's name."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import pytest

import nbparallel as nbp
from nbparallel.cluster import host_dispatch, host_session
from nbparallel.cluster.host_messages import NodeReply
from nbparallel.session.diagnostics.doctor import Severity, examine
from nbparallel.session.monitoring.timeline import Timeline, chrome_trace
from nbparallel.testing.waiting import wait_until
from nbparallel_widgets.panel_view import PanelView
from nbparallel_widgets.timeline_view import TimelineView
from tests.cluster.host_conformance import meeting
from tests.cluster.sink import Sink
from tests.harness.clusters import Loopback
from tests.harness.clusters.loopback import LoopbackHost

pytestmark = [
    pytest.mark.time_limit(60),
    pytest.mark.may_leave("descriptor", "mapping", reason="the nodes are here, and their ranks hold arrays"),
]
NOT_SEEN = "is not seen: host b: it does not answer now"
PLACES = [(0, "a"), (1, "a"), (2, "b"), (3, "b")]


class GatedLoopback(Loopback):
    """A cluster whose anchors and pieces of arrays wait until they may pass."""

    def __init__(self) -> None:
        super().__init__(["a", "b"])
        self.open = threading.Event()
        self.open.set()

    def anchor(self, host: str) -> LoopbackHost:
        """Start a node, if it may."""
        assert self.open.wait(30)
        return super().anchor(host)

    def call(self, op: str, data: Mapping[str, bytes], timeout: float) -> dict[str, NodeReply]:
        """Call, if it may."""
        assert op != "fill" or self.open.wait(30)
        return super().call(op, data, timeout)


class BarSink(Sink):
    """Keeps the states of the bar, too."""

    def __init__(self) -> None:
        super().__init__()
        self.states: list[str] = []

    def progress(self, text: str) -> None:
        """Take a state of the bar."""
        self.states.append(text)


@pytest.fixture(scope="module")
def cluster() -> GatedLoopback:
    """Return two hosts with two ranks each."""
    return GatedLoopback()


@pytest.fixture(scope="module")
def hosts(cluster: GatedLoopback) -> Iterator[nbp.Session]:
    """Return a session on them."""
    with nbp.Session(cluster=cluster) as session:
        session.run("pass")
        yield session


def _timeline(session: nbp.Session) -> Timeline:
    timeline = session.timeline()
    assert timeline is not None
    return timeline


def _phase(session: nbp.Session) -> str:
    try:
        return session.activity().phase
    except RuntimeError:  # not started
        return ""


def test_before_the_start_there_is_nothing_to_see() -> None:
    """As on one machine."""
    session = nbp.Session(cluster=Loopback(["a"]))
    for view in (session.statistics, session.who, session.activity):
        with pytest.raises(RuntimeError, match="no ranks are running"):
            view()
    assert session.complete("pri", 3) == ()
    session.stop()


@pytest.mark.slow
def test_statistics_have_all_ranks_and_what_hosts_hold(hosts: nbp.Session) -> None:
    """Each with its host, and segments of two hosts are not one, though they have one number there."""
    pids = list(hosts.run("import os, numpy as np\nheld = nbp.zeros(50_000)\nos.getpid()").values)
    seen = hosts.statistics()
    assert [(rank.rank, rank.host, rank.state) for rank in seen.ranks] == [(*p, "idle") for p in PLACES]
    assert [rank.pid for rank in seen.ranks] == pids
    assert seen.world_size == 4
    made = [record for record in seen.segments if record.maker.startswith("rank ")]
    assert sorted((record.maker, record.host) for record in made) == [(f"rank {r}", h) for r, h in PLACES]
    assert len({record.segment for record in seen.segments}) == len(seen.segments)
    assert seen.shared_nbytes >= 4 * 400_000


def test_names_of_ranks_and_of_the_notebook(hosts: nbp.Session) -> None:
    """What was sent is a copy; what only some ranks have is on these."""
    names = {"x": np.arange(10.0), "listed": [1, 2], "here": 5}
    hosts.run("x, listed\nif rank == 2: odd = x[:3]", namespace=names)
    found = {record.name: record for record in hosts.who(names).names}
    assert (found["x"].how, found["listed"].how) == ("copied", "copied")
    assert list(found["x"].ranks) == [0, 1, 2, 3]
    assert all(info.as_delivered for info in found["x"].ranks.values())
    assert not found["x"].outdated
    assert (found["odd"].how, list(found["odd"].ranks)) == ("own", [2])
    assert found["here"].how == "notebook only"
    assert hosts.who(names).answered == (0, 1, 2, 3)
    complete = lambda: [one.text for one in hosts.complete("liste", 5, patience=1.0)]  # noqa: E731
    wait_until(lambda: "listed" in complete(), seconds=30)


def test_what_ranks_do_while_a_cell_runs(hosts: nbp.Session, tmp_path: Path) -> None:
    """Who waits for whom, over hosts; afterwards where the time went, until the next cell."""
    gate = tmp_path / "gate"
    cell = f"import os, time\nwhile rank == 3 and not os.path.exists({str(gate)!r}): time.sleep(0.01)\n"
    pending = hosts.submit(f"{cell}all_reduce(rank)", execution_count=7)
    states = lambda: [rank.state for rank in hosts.activity().ranks]  # noqa: E731
    wait_until(lambda: states() == ["waiting"] * 3 + ["computing"], lambda: str(states()), seconds=30)
    seen = hosts.activity()
    assert [(rank.rank, rank.host) for rank in seen.ranks] == PLACES
    assert (seen.phase, seen.number, seen.culprits) == ("running", 7, (3,))
    assert seen.ranks[1].waits_for == seen.ranks[2].waits_for == (3,)
    lines = [line.strip() for line in str(PanelView(seen)).splitlines()]
    heads = [line.split("|")[0].strip() for line in lines]
    assert [head for head in heads if head in ("host a", "host b", "0")] == ["host a", "0", "host b"]
    assert "rank 3 holds the others up" in str(PanelView(seen))
    assert hosts.who().busy == (0, 1, 2, 3)
    gate.touch()
    assert list(pending.result(30).values) == [6] * 4
    seen = hosts.activity()
    assert (seen.phase, states()) == ("finished", ["idle"] * 4)
    assert seen.ranks[0].waiting > seen.ranks[3].waiting
    assert seen.ranks[3].computing > seen.ranks[0].computing
    assert [rank.operations for rank in seen.ranks] == [1] * 4
    assert hosts.activity().ranks[0].computing == seen.ranks[0].computing
    assert "not known of ranks on several hosts" in PanelView(seen)._repr_html_()


def test_the_rank_that_failed_is_marked(hosts: nbp.Session) -> None:
    """By the whole cell's clock; its host knows how its part has ended."""
    with pytest.raises(nbp.ParallelError):
        hosts.run("1 / (rank - 2)")
    seen = hosts.activity()
    assert (seen.phase, seen.failed_rank, seen.failed_line) == ("failed", 2, 1)
    assert seen.ranks[2].state == "failed"


def test_a_timeline_has_the_ranks_of_all_hosts(hosts: nbp.Session) -> None:
    """Below their hosts, with whom they waited for on others, and how exact that is."""
    cell = """
import time
for i in range(1 + rank // 2): all_reduce(1, group=dist.host_group())
time.sleep(0.2 * (rank == 3))
all_reduce(rank)
"""
    hosts.run(cell, execution_count=5)
    timeline = _timeline(hosts)
    assert [(row.rank, row.host) for row in timeline.rows] == PLACES
    assert {wait.waits_for for wait in timeline.waits() if (wait.line, wait.rank == 3) == (4, False)} == {3}
    assert timeline.clock_error is not None
    assert 0 < timeline.clock_error < 0.05
    came, left = meeting(timeline, 4)
    assert 0.2 < came <= left + timeline.clock_error
    text = str(TimelineView(timeline))
    assert re.search("the clocks of hosts agree within [0-9.]+ .s", text)
    assert text.index("host b") < text.index("rank 3 |") < text.index("host a") < text.index("rank 0 |")
    html = TimelineView(timeline)._repr_html_()
    assert html.count('scope="rowgroup"') == 2
    assert "In[5] on ranks 0-3" in text
    names = {event["args"].get("name") for event in chrome_trace(timeline)["traceEvents"]}
    assert {"rank 0 (host a)", "rank 3 (host b)"} <= names


def test_a_timeline_of_some_ranks(hosts: nbp.Session) -> None:
    """On one host there is one clock; ranks of several, which cannot meet, were not compared."""
    hosts.run("all_reduce(1, group=dist.host_group())", ranks=[2, 3])
    timeline = _timeline(hosts)
    assert ([row.rank for row in timeline.rows], timeline.clock_error) == ([2, 3], 0.0)
    hosts.run("rank", ranks=[1, 2])
    timeline = _timeline(hosts)
    assert ([row.rank for row in timeline.rows], timeline.clock_error) == ([1, 2], None)
    assert all(0 < row.began < row.ended < 10 for row in timeline.rows)
    assert "clocks of hosts were not compared" in str(TimelineView(timeline))


def test_the_doctor_looks_at_all_hosts(hosts: nbp.Session) -> None:
    """And says how safe the cluster is."""
    found = examine(session=hosts)
    assert {finding.host for finding in found} == {"", "a", "b"}
    safety = next(finding for finding in found if finding.subject == "security")
    assert safety.state is Severity.WARNING
    assert "loopback://" in safety.seen
    assert "this machine and the hosts" in str(found)


def test_a_host_that_does_not_answer_is_not_seen(
    hosts: nbp.Session, cluster: GatedLoopback, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others are; of it there is what it said last, and when, and it is seen again when it answers."""
    monkeypatch.setattr(host_session, "VIEW_SECONDS", 0.2)
    monkeypatch.setattr(host_session, "LOOK_SECONDS", 0.2)
    hosts.run("import time; time.sleep(0.1)")
    before = hosts.activity()
    cluster.nodes["b"].frozen.set()
    try:
        seen = hosts.activity()
        assert [rank.state == "unseen" for rank in seen.ranks] == [False, False, True, True]
        assert seen.ranks[3].computing == before.ranks[3].computing > 0.1
        assert re.search("ranks 2-3: host b: it does not answer now; as of [0-9:]{8}", str(PanelView(seen)))
        assert [row.died for row in _timeline(hosts).rows][1:3] == ["", NOT_SEEN]
        assert sorted(hosts.who().silent) == [2, 3]
    finally:
        cluster.nodes["b"].frozen.clear()
    monkeypatch.undo()
    assert not any(row.died for row in _timeline(hosts).rows)
    assert all(rank.state != "unseen" for rank in hosts.activity().ranks)


@pytest.mark.slow
def test_a_lost_host_is_not_seen() -> None:
    """Every view says so, and has what the other host says."""
    cluster = Loopback(["a", "b"])
    with nbp.Session(cluster=cluster) as session:
        session.run("mine = rank")
        cluster.lose("b")
        seen = session.statistics()
        assert [rank.state for rank in seen.ranks] == ["idle", "idle", "unseen", "unseen"]
        assert "host b" in seen.ranks[2].operation
        names = session.who()
        assert (names.answered, sorted(names.silent)) == ((0, 1), [2, 3])
        problems = [finding for finding in examine(session=session) if finding.state is Severity.PROBLEM]
        assert [finding.host for finding in problems] == ["b"]
        assert session.run("mine", ranks=[0, 1]).values == [0, 1]
        assert "host b is lost" in session.activity().ranks[3].operation


@pytest.mark.slow
def test_a_start_and_an_array_on_its_way_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """From another thread; the sink gets a bar, which goes when the array is there."""
    monkeypatch.setattr(host_dispatch, "BAR_SECONDS", 0.0)
    cluster, sink = GatedLoopback(), BarSink()
    cluster.open.clear()
    session = nbp.Session(cluster=cluster)
    starting = threading.Thread(target=session.start)
    starting.start()
    wait_until(lambda: _phase(session) == "starting", seconds=30)
    assert session.activity().starting_ranks == 4
    assert [(rank.rank, rank.host) for rank in session.activity().ranks] == PLACES
    cluster.open.set()
    starting.join(30)
    cluster.open.clear()
    names = {"big": np.zeros(1 << 20)}
    sending = threading.Thread(target=lambda: session.run("big.sum()", namespace=names, sink=sink))
    sending.start()
    wait_until(lambda: _phase(session) == "moving", seconds=30)
    assert (session.activity().moving_name, session.activity().moving_nbytes) == ("big", 8 << 20)
    cluster.open.set()
    sending.join(30)
    assert sink.states[-1] == ""
    assert "sending big: |" in sink.states[-2]
    assert "of 8.0 MiB" in sink.states[-2]
    assert _phase(session) == "finished"
    session.stop()
