"""HostPool: the hosts of a session and a node on each, from the first use to the end.

It stands where a session of one machine has its `ElasticPool`, and where a task has its `RankPool`.
"""

from __future__ import annotations

import json
import pickle
import queue
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

from nbparallel.cluster.contract import MOST_PIECE, Anchor, Cluster, NodeReply
from nbparallel.cluster.host_messages import EventJoiner, HostStart, OutputItem
from nbparallel.cluster.long_calls import LongCalls
from nbparallel.cluster.node import NODE, NUMBER, versions
from nbparallel.errors import (
    STOPPED,
    ClosedError,
    HostBoundaryError,
    HostLostError,
    StartError,
    rank_list,
)
from nbparallel.session.interrupts import InterruptCounter
from nbparallel.session.names.delivery import NameDelivery
from nbparallel.session.output import TaskOutput
from nbparallel.transfer.blobs import ByValue
from nbparallel.wire.identity import WorldPlace
from nbparallel.wire.system import do_all

START_SECONDS = 90.0
"""Bound for the start of a host's ranks, generous: an environment may lie on a slow disk."""
RETURN_SECONDS = 3.0
"""How long the next task waits for a worker that has ended to be there again: its nanny may start it."""
NEW_LINE = "\n"
AGAIN = "; and it could not be started again: "
ANSWER_SECONDS = 15.0
"""Bound for calls that a node answers immediately."""
NO_RESIZE = (
    "the number of ranks of a session on hosts is fixed when it is made: make another one, as with "
    "Session(cluster=client, ranks_per_host=4)"
)


class HostPool:
    """Owns the anchors of a session's hosts, and what comes from their nodes.

    Parameters
    ----------
    cluster : Cluster
        It belongs to this object.
    place : callable
        Returns where ranks are to be, given the cluster's hosts.
    names : NameDelivery
        Forgets what was delivered to ranks that have ended.
    output_of : callable
        Returns where the output of a task goes.
    """

    hosts: WorldPlace | None = None
    broker = None
    """No memory is shared with a host."""

    def __init__(
        self,
        cluster: Cluster,
        place: WorldPlace,
        start_method: str,
        names: NameDelivery,
        output_of: Callable[[int], TaskOutput | None],
    ) -> None:
        self.cluster, self.place, self.start_method = cluster, place, start_method
        self.world_size = place.world_size
        self.pool: HostPool | None = None
        """Itself, when the ranks run."""
        self.store: Any = ByValue()
        self.messages: queue.SimpleQueue[tuple[str, tuple[Any, ...]] | None] = queue.SimpleQueue()
        """What nodes have sent that is no output, with the host; None: look again."""
        self._names, self._output_of = names, output_of
        self._anchors: dict[str, Anchor] = {}
        self._joiners: dict[str, EventJoiner] = {}
        self._changed: set[str] = set()
        """Hosts on which ranks have died since the last task."""
        self.heard: set[str] = set()
        """Hosts of which something has come since this was cleared."""
        self._lost: dict[str, str] = {}
        """Hosts that are lost, and how that was seen."""
        self._notes: list[str] = []
        self._closed = False
        cluster.events(self)

    # what the cluster passes on, in any thread -----------------------------------------------------------

    def event(self, host: str, data: bytes) -> None:
        """Take an event of a node."""
        self.heard.add(host)
        try:
            message = self._joiners[host].feed(data)
        except Exception as error:  # noqa: BLE001  unpickling what is damaged may raise anything
            self.lost(host, f"its node sent what cannot be read ({type(error).__name__}: {error})")
            return
        if message is None:
            return
        if message[0] == "output":
            self._show(*message[1:])
        elif message[0] != "here":
            self.messages.put((host, message))

    def _show(self, number: int, items: list[OutputItem]) -> None:
        output = self._output_of(number)
        if output is None:
            return
        for item in items:
            if item.kind == "note":
                output.note(item.text)
            elif item.display is not None:
                output.display(item.rank, item.display)
            else:
                output.stream(item.rank, item.kind, item.text)

    def lost(self, host: str, reason: str) -> None:
        """Take the loss of a host."""
        self.messages.put((host, ("lost", reason)))

    def wake(self) -> None:
        """Make `messages` return something; safe in a signal handler."""
        self.messages.put(None)

    # hosts ------------------------------------------------------------------------------------------------

    @property
    def supervisor(self) -> HostPool:
        """Itself: it has what tasks need of a supervisor."""
        return self

    @property
    def ranks(self) -> range:
        """The numbers of all ranks."""
        return range(self.world_size)

    @property
    def running(self) -> HostPool:
        """Refuse what looks at ranks of this machine."""
        raise HostBoundaryError(
            "statistics, activity, lists of names and completions look at ranks of this machine, and these "
            "are on hosts of a cluster: have a cell return what you want to know"
        )

    starting = handles = running

    def call(self, op: str, data: Mapping[str, bytes], timeout: float) -> dict[str, NodeReply]:
        """Call nodes."""
        return self.cluster.call(op, data, timeout)

    def checked_call(self, op: str, data: Mapping[str, bytes], timeout: float) -> dict[str, bytes]:
        """Call nodes; raise a `StartError` that names the first host that did not do it."""
        replies = self.call(op, data, timeout)
        for host, reply in replies.items():
            if reply.error or reply.silent:
                reason = reply.error or f"no answer within {timeout:g} s"
                raise StartError(f"host {host}: {reason}")
        return {host: reply.data for host, reply in replies.items()}

    def ensure(self, interrupts: InterruptCounter) -> HostPool:
        """Return a pool whose ranks all live, as far as hosts are there; `take_notes` returns what was begun.

        Raises
        ------
        StartError
            A host could not start its ranks; at the first use no host keeps any.
        """
        self._refuse_closed()
        if self.pool is None:
            try:
                self._start(range(len(self.place.hosts)), interrupts)
                self._refuse_closed()
            except BaseException:
                self._release()
                raise
            self.pool = self
        self._drain()
        if self._lost:
            self._replace(interrupts)
        if self._changed:
            self._revive()
        return self

    def _start(self, indices: Iterable[int], interrupts: InterruptCounter) -> None:
        """Start the ranks of some of the hosts."""
        started = {self.place.hosts[index]: index for index in indices}
        with LongCalls(interrupts) as launch:
            for host in started:
                self._joiners[host] = EventJoiner()
                launch.begin(partial(self._anchor, host, launch))
        mine = versions()
        for host, data in self.checked_call("hello", dict.fromkeys(started, b""), START_SECONDS).items():
            theirs = json.loads(data)
            odd = [
                f"{what} {theirs.get(what)} (here {mine[what]})"
                for what in mine
                if theirs.get(what) != mine[what]
            ]
            if odd:
                raise StartError(f"host {host} has {', '.join(odd)}: use the same environment on all hosts")
        places = {
            host: WorldPlace(self.place.hosts, self.place.firsts, index) for host, index in started.items()
        }
        starts = {host: pickle.dumps(HostStart(place, self.start_method)) for host, place in places.items()}
        with LongCalls(interrupts) as launch:
            launch.begin(partial(self.checked_call, "start", starts, START_SECONDS))

    def _anchor(self, host: str, launch: LongCalls) -> None:
        anchor = self.cluster.anchor(host, NODE)
        self._anchors[host] = anchor
        if launch.abandoned:
            anchor.release()

    def _refuse_closed(self) -> None:
        if self._closed:
            raise ClosedError(STOPPED)

    def _replace(self, interrupts: InterruptCounter) -> None:
        """Start the ranks of lost hosts on a worker of that name, or on a host that is not in use.

        Where there is none, a task for these ranks is refused, and others run.
        """
        deadline = time.monotonic() + RETURN_SECONDS
        for host, reason in list(self._lost.items()):
            while not (done := self._try_replace(host, reason, interrupts)) and time.monotonic() < deadline:
                interrupts.check()
                time.sleep(0.1)
            if done:
                self._changed.discard(host)

    def _try_replace(self, host: str, reason: str, interrupts: InterruptCounter) -> bool:
        """Start the ranks of a lost host if a host can be found for them; return whether they run."""
        if (found := self._find_replacement(host)) is None:
            return False
        former, index = self.place, self.place.hosts.index(host)
        hosts = (*former.hosts[:index], found, *former.hosts[index + 1 :])
        self.place = WorldPlace(hosts, former.firsts, 0)
        try:
            self._start([index], interrupts)
        except BaseException as error:
            self.host_lost(found, "")
            del self._lost[found]
            self.place, self._lost[host] = former, f"{reason.partition(AGAIN)[0]}{AGAIN}{error}"
            if isinstance(error, StartError):
                return False  # such as of a worker whose end the scheduler has not noticed
            raise
        del self._lost[host]
        ranks = range(former.firsts[index], former.firsts[index + 1])
        for rank in ranks:
            self._names.rank_lost(rank)
        self._notes.append(
            f"host {host} was lost ({reason.partition(NEW_LINE)[0]}), and with it the variables of "
            f"{rank_list(ranks)}: {'it runs' if len(ranks) == 1 else 'they run'} again, on host {found}"
        )
        return True

    def _find_replacement(self, host: str) -> str | None:
        there = [other.name for other in self.cluster.hosts()]
        unused = [other for other in there if other not in self.place.hosts]
        return host if host in there else next(iter(unused), None)

    def refuse_lost(self, ranks: Iterable[int]) -> None:
        """Raise if one of these ranks is on a host that is lost."""
        wanted = {self.host_of(rank) for rank in ranks}
        for host, reason in self._lost.items():
            if host in wanted:
                lost = tuple(rank for rank in self.ranks if self.host_of(rank) == host)
                left = [rank for rank in self.ranks if self.host_of(rank) not in self._lost]
                raise HostLostError(
                    f"host {host} is lost, and {rank_list(lost)} with it: {reason}; no worker has that name, "
                    f"and no host is unused: start a worker, or use ranks={left}",
                    host=host, ranks=lost, reason=reason,
                )  # fmt: skip

    def next_message(self, timeout: float) -> tuple[str, tuple[Any, ...]] | None:
        """Return what a node has sent, and which; None after `timeout` seconds or a `wake`.

        Raises
        ------
        ClosedError
            The session is being stopped.
        """
        try:
            item = self.messages.get(timeout=timeout)
        except queue.Empty:
            item = None
        if item is None and self._closed:
            raise ClosedError("the session was stopped while its ranks were running")
        return item

    def _drain(self) -> None:
        """Take what nodes have sent since the last task."""
        while not self.messages.empty():
            item = self.messages.get()
            if item is not None and item[1][0] == "died":
                self._changed.add(item[0])
            elif item is not None and item[1][0] == "lost":
                self.host_lost(item[0], item[1][1])

    def changed(self, host: str) -> None:
        """Record that a rank of a host has ended."""
        self._changed.add(host)

    def host_lost(self, host: str, reason: str, *, silent: bool = False) -> None:
        """Record that a host is lost; should its node still run, it ends."""
        self._lost[host] = reason
        if (anchor := self._anchors.pop(host, None)) is not None:
            anchor.release(give_up=silent)

    def _revive(self) -> None:
        """Have nodes start ranks again that have died."""
        changed, self._changed = self._changed, set()
        for data in self.checked_call("ready", dict.fromkeys(changed, b""), START_SECONDS).values():
            for rank in json.loads(data):
                self._names.rank_lost(rank)

    def send_task(self, number: int, data: Mapping[str, bytes]) -> dict[str, NodeReply]:
        """Send hosts their parts of a task, the large ones in pieces; return what they replied."""
        data, failed = dict(data), dict[str, NodeReply]()
        head = NUMBER.pack(number, 0)
        room = MOST_PIECE - NUMBER.size
        while large := {host: part[:room] for host, part in data.items() if len(part) > room}:
            for host, reply in self.call(
                "put", {host: head + part for host, part in large.items()}, ANSWER_SECONDS
            ).items():
                data[host] = data[host][room:]
                if reply.error or reply.silent:
                    failed[host] = reply
                    del data[host]
        return failed | self.call("task", {host: head + part for host, part in data.items()}, ANSWER_SECONDS)

    def take_report(self, host: str, number: int, nbytes: int) -> bytes:
        """Return a report that is too large for an event."""
        parts, size = [], 0
        while size < nbytes:
            reply = self.checked_call("take", {host: NUMBER.pack(number, size)}, ANSWER_SECONDS)[host]
            parts.append(reply)
            size += len(reply)
        return b"".join(parts)

    def host_of(self, rank: int) -> str:
        """Return the name of a rank's host."""
        return self.place.host_of(rank)

    def take_notes(self) -> list[str]:
        """Return a line for everything that was started again since the last time."""
        notes, self._notes = self._notes, []
        return notes

    # as of one machine ------------------------------------------------------------------------------------

    def invalidate_epoch(self) -> None:
        """Do nothing: nodes know by themselves."""

    def end(self, rank: int | None) -> None:
        """Restart a rank, or all."""
        hosts = self.place.hosts if rank is None else (self.host_of(rank),)
        which = b"-1" if rank is None else str(rank).encode()
        self.checked_call("restart", dict.fromkeys(hosts, which), START_SECONDS)
        for lost in self.ranks if rank is None else (rank,):
            self._names.rank_lost(lost)

    def grow(self, world_size: int, interrupts: InterruptCounter) -> None:
        """Refuse."""
        raise HostBoundaryError(NO_RESIZE)

    def close(self) -> None:
        """Make a thread that waits for a host raise."""
        self._closed = True
        self.pool = None
        self.wake()

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    def stop(self) -> None:
        """End every node; after `close`."""
        do_all(self._release, self.cluster.close)

    def _release(self) -> None:
        anchors, self._anchors = self._anchors, {}
        do_all(*(partial(anchor.release) for anchor in anchors.values()))
