"""HostPool: the hosts of a session and a node on each, from the first use to the end.

It stands where a session of one machine has its `ElasticPool`, and where a task has its `RankPool` and its
supervisor.
"""

from __future__ import annotations

import contextlib
import itertools
import pickle
import queue
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from nbparallel import errors
from nbparallel.cluster.host_messages import MORE, versions
from nbparallel.cluster.host_place import HostPlace
from nbparallel.errors import rank_list
from nbparallel.session.interrupts import InterruptCounter
from nbparallel.session.names.delivery import NameDelivery
from nbparallel.session.output import TaskOutput
from nbparallel.sharing import Store
from nbparallel.transfer.pickle_format import BY_VALUE
from nbparallel.wire.system import do_all

if TYPE_CHECKING:
    from nbparallel.cluster.dask.dask_cluster import DaskAnchor, DaskCluster

# Calls that take long, side by side, which an interrupt does not wait for.

MOST_SECONDS = 180.0
"""Bound for all of them; each has shorter ones, unless its host has stopped."""
SLICE_SECONDS = 0.1
"""Between two looks whether the user has interrupted."""


def perform_calls(
    calls: Mapping[str, Callable[[], object]], interrupts: InterruptCounter,
    seconds: float | None = None, together: int | None = None,
) -> None:  # fmt: skip
    """Perform calls, each in a thread; return when all have, or raise what the first one raised.

    At most so many are performed `together`, by default all.  An interrupt raises soon: what a call makes
    afterwards it has to end itself.  `StartError` names those that have not returned in time: the names are
    what each waits for.
    """
    seconds = MOST_SECONDS if seconds is None else seconds
    jobs, left, deadline = iter(calls.items()), dict[Future[None], str](), time.monotonic() + seconds
    while True:
        for name, call in itertools.islice(jobs, (together or len(calls)) - len(left)):
            left[_begin(call)] = name
        if not left:
            return
        interrupts.check()
        done, _ = wait(left, SLICE_SECONDS, FIRST_COMPLETED)
        for future in done:
            del left[future]
            future.result()
        if not done and time.monotonic() > deadline:
            raise errors.StartError(f"no answer for {seconds:g} s: {', '.join(sorted(left.values()))}")


def _begin(call: Callable[[], object]) -> Future[None]:
    """Perform a call in a thread, for which the end of this process does not wait."""
    future = Future[None]()

    def perform() -> None:
        try:
            call()
        except BaseException as error:  # noqa: BLE001  the caller raises it
            future.set_exception(error)
        else:
            future.set_result(None)

    threading.Thread(target=perform, name="nbparallel-call", daemon=True).start()
    return future


LINK_SECONDS = 20.0
"""How long two workers may take to connect."""
START_SECONDS = 90.0
"""Bound for the start of a host's ranks, generous: an environment may lie on a slow disk."""
RETURN_SECONDS = 3.0
"""How long the next task waits for a worker that has ended to be there again: its nanny may start it."""
ANSWER_SECONDS, LAST_SECONDS = 13.0, 2.0
"""Bounds for calls that a node answers immediately, and for one that it gets when it has not answered."""
NEW_LINE = "\n"
AGAIN = "; and it could not be started again: "


class HostPool:
    """Owns the cluster and the anchors of a session's hosts, and what comes from their nodes."""

    # what is not said here as in `ElasticPool` and `RankPool`

    broker = None  # no memory is shared with a host

    def __init__(
        self, cluster: DaskCluster, place: HostPlace, start_method: str, names: NameDelivery,
        output_of: Callable[[int], TaskOutput | None],
    ) -> None:  # fmt: skip
        self.cluster, self.place, self.start_method = cluster, place, start_method
        self.ranks = range(place.world_size)
        self.pool: HostPool | None = None  # itself, when the ranks run
        self.starting: tuple[int, ...] = ()  # the ranks that are being started
        self.store: Store = BY_VALUE
        self.messages: queue.SimpleQueue[tuple[str, tuple[Any, ...]] | None] = queue.SimpleQueue()
        """What nodes have sent that is no output, with the host; None: look again."""
        self.changed: set[str] = set()  # hosts on which ranks have died since the last task
        self.heard: set[str] = set()  # hosts of which something has come since this was cleared
        self._names, self._output_of = names, output_of
        self._anchors: dict[str, DaskAnchor] = {}
        self._begun: dict[str, bytes] = {}  # what has come of a message that takes several events, by host
        self._given_up: frozenset[str] = frozenset()  # hosts that were lost since they did not answer
        self._silent: set[str] = set()  # hosts of which the last call of `ask` got no answer
        self.losses: dict[str, str] = {}  # hosts that are lost, and how that was seen
        self._notes: list[str] = []
        self._linked: dict[tuple[str, str], int] = {}
        """Hosts that are connected, names in order; and the last task that does not use their link."""
        self.task = -1  # number of the last task that was sent
        self.epoch = 0  # of all hosts together: what a rank sent in the last one no rank of another receives
        self.closed = False
        cluster.events(self)

    # what the cluster passes on, in any thread -----------------------------------------------------------

    def event(self, host: str, data: bytes) -> None:
        self.heard.add(host)
        try:
            whole = self._begun.pop(host, b"") + data[1:]
            if data[:1] == MORE:
                self._begun[host] = whole
                return
            message = pickle.loads(whole)
        except Exception as error:  # noqa: BLE001  unpickling what is damaged may raise anything
            self.lost(host, f"its node sent what cannot be read ({type(error).__name__}: {error})")
            return
        if message[0] not in ("output", "here"):
            self.messages.put((host, message))
        elif message[0] == "output" and (output := self._output_of(message[1])) is not None:
            for method, *content in message[2]:
                getattr(output, method)(*content)

    def unlinked(self, host: str, other: str, task: int) -> None:
        self.messages.put((host, ("unlinked", other, task)))

    def lost(self, host: str, reason: str) -> None:
        self.messages.put((host, ("lost", reason)))

    def wake(self) -> None:
        self.messages.put(None)  # safe in a signal handler

    # hosts ------------------------------------------------------------------------------------------------

    @property
    def running(self) -> HostPool:
        """Itself; RuntimeError if the ranks do not run."""
        if self.pool is None:
            raise RuntimeError(errors.NO_RANKS)
        return self

    def ask(self, op: str, data: Mapping[str, Any], seconds: float) -> dict[str, Any]:
        """Call a method of nodes, with each one's arguments; return what each did, or name one that fails."""
        calls = {host: what if isinstance(what, bytes) else pickle.dumps(what) for host, what in data.items()}
        replies = self.cluster.call(op, calls, seconds)
        self._silent = {host for host, reply in replies.items() if reply.silent}
        for host, reply in replies.items():
            if reply.error or reply.silent:
                raise errors.StartError(f"host {host}: {reply.error or f'no answer within {seconds:g} s'}")
        return {host: pickle.loads(reply.data) for host, reply in replies.items()}

    def ensure(self, interrupts: InterruptCounter) -> HostPool:
        """Return a pool whose ranks all live, as far as hosts are there; `take_notes` returns what was begun.

        After a `StartError` at the first use no host keeps any ranks.
        """
        if self.pool is None:
            try:
                self._start(range(len(self.place.hosts)), interrupts)
                if self.closed:
                    raise errors.ClosedError(errors.STOPPED)
            except BaseException:
                self._release()
                raise
            self.pool = self
        self._hear()
        self._replace(interrupts)
        try:
            self._connect(interrupts)
        except errors.StartError:  # perhaps of a host whose end is known only now
            if not self._hear():
                raise
            self._replace(interrupts)
            self._connect(interrupts)
        return self

    def _hear(self) -> bool:
        """Take what has happened since the last task; return whether a host was lost."""
        lost = False
        while not self.messages.empty():
            host, (kind, *rest) = self.next_event(0) or ("", ("",))
            if kind == "lost":
                self.host_lost(host, rest[0])
                lost = True
        return lost

    def _connect(self, interrupts: InterruptCounter) -> None:
        """Have all ranks of hosts that are there live, and every two connected; an error names both."""
        here = set(self.place.hosts) - self.losses.keys()
        self.epoch += bool(self.changed)
        asked = dict.fromkeys(self.changed & here, ())
        for revived in self.ask("take_revived", asked, START_SECONDS).values():
            self._forget(revived)
        self.changed.clear()
        pairs = set(itertools.combinations(sorted(here), 2)) - self._linked.keys()
        link = self.cluster.link
        perform_calls({f"hosts {a} and {b}": partial(link, a, b, LINK_SECONDS) for a, b in pairs}, interrupts)
        self._linked |= dict.fromkeys(pairs, self.task)

    def _start(self, indices: Iterable[int], interrupts: InterruptCounter) -> None:
        """Start the ranks of some of the hosts."""
        places = {self.place.hosts[index]: replace(self.place, index=index) for index in indices}
        self.starting = tuple(rank for place in places.values() for rank in place.ranks)
        abandoned = threading.Event()

        def anchor(host: str) -> None:
            made = self._anchors[host] = self.cluster.anchor(host)
            if abandoned.is_set():
                made.release()

        self._begun = {host: begun for host, begun in self._begun.items() if host not in places}
        mine = versions().items()
        starts = {host: (place, self.start_method) for host, place in places.items()}
        start = partial(self.ask, "start", starts, START_SECONDS)
        try:
            perform_calls({f"host {host}": partial(anchor, host) for host in places}, interrupts)
            for host, its in self.ask("hello", dict.fromkeys(places, ()), START_SECONDS).items():
                odd = [f"{what} {its.get(what)} (here {own})" for what, own in mine if its.get(what) != own]
                if odd:
                    raise errors.StartError(
                        f"host {host} has {', '.join(odd)}: use the same environment on all hosts"
                    )
            perform_calls({f"hosts {', '.join(starts)}": start}, interrupts)
        except BaseException:
            abandoned.set()
            raise
        self.starting = ()

    def _forget(self, ranks: Iterable[int]) -> None:
        for rank in ranks:
            self._names.rank_lost(rank)

    def _replace(self, interrupts: InterruptCounter) -> None:
        """Start the ranks of lost hosts on a worker of that name, or on a host that is not in use.

        Where there is none, a task for these ranks is refused, and others run.
        """
        deadline = time.monotonic() + RETURN_SECONDS
        for host in list(self.losses):
            while not self._try_replace(host, interrupts) and time.monotonic() < deadline:
                interrupts.check()
                time.sleep(0.1)

    def _try_replace(self, host: str, interrupts: InterruptCounter) -> bool:
        """Start the ranks of a lost host if a host can be found for them; return whether they run."""
        there = self.cluster.hosts()
        unused = [other for other in there if other not in self.place.hosts]
        found = host if host in there else next(iter(unused), None)
        if found is None:
            return False
        former, reason = self.place, self.losses[host]
        index = former.hosts.index(host)
        self.place = replace(former, hosts=(*former.hosts[:index], found, *former.hosts[index + 1 :]))
        try:
            self._start([index], interrupts)
        except BaseException as error:
            self.host_lost(found, "")
            del self.losses[found]
            self.place, self.losses[host] = former, f"{reason.partition(AGAIN)[0]}{AGAIN}{error}"
            if isinstance(error, errors.StartError):
                return False  # such as of a worker whose end the scheduler has not noticed
            raise
        del self.losses[host]
        if found != host:
            others = set(self.place.hosts) - self.losses.keys() - {found}
            with contextlib.suppress(errors.StartError):  # of one that is lost as well: the task finds that
                self.ask("rename_hosts", dict.fromkeys(others, (self.place.hosts,)), ANSWER_SECONDS)
        ranks = former.parts[host]
        self._forget(ranks)
        self._notes.append(
            f"host {host} was lost ({reason.partition(NEW_LINE)[0]}), and with it the variables of "
            f"{rank_list(ranks)}: {'it runs' if len(ranks) == 1 else 'they run'} again, on host {found}"
        )
        return True

    def refuse_lost(self, ranks: Iterable[int]) -> None:
        """Raise if one of these ranks is on a host that is lost."""
        for host in map(self.place.host_of, ranks):
            if (reason := self.losses.get(host)) is not None:
                left = [rank for rank in self.ranks if self.place.host_of(rank) not in self.losses]
                why = "its worker is not used again" if host in self._given_up else "no worker has that name"
                advice = f"; {why}, and no host is unused: {self.cluster.advice}"
                advice += f", or use ranks={left}" * bool(left)
                raise host_loss(host, self.place.parts[host], reason, advice)

    def refuse_gone(self, host: str) -> None:
        """Raise if the node of a host is not there any more."""
        seconds = LAST_SECONDS if host in self._silent else ANSWER_SECONDS
        reply = self.cluster.call("hello", {host: pickle.dumps(())}, seconds)[host]
        if reason := reply.error or (f"no answer within {ANSWER_SECONDS:g} s" if reply.silent else ""):
            self.host_lost(host, reason, silent=reply.silent)  # one that answers can be used again
            raise host_loss(host, self.place.parts[host], reason)

    def next_event(self, timeout: float | None) -> tuple[str, tuple[Any, ...]] | None:
        """Return what a node has sent about a task or its end, and which; None: nothing, or a `wake`."""
        try:
            host, message = self.messages.get(timeout=timeout) or ("", ("",))
        except queue.Empty:
            host, message = "", ("",)
        if self.closed:
            raise errors.ClosedError("the session was stopped while its ranks were running")
        if message[0] == "died":
            self.changed.add(host)
        elif message[0] == "unlinked":
            self._link_lost(host, *message[1:])
        elif host:
            return host, message
        return None

    def host_lost(self, host: str, reason: str, *, silent: bool = False) -> None:
        """Record that a host is lost; should its node still run, it ends."""
        self.losses[host], self.starting = reason, ()
        self.epoch += 1
        self._given_up = self._given_up | {host} if silent else self._given_up - {host}
        self._linked = {pair: task for pair, task in self._linked.items() if host not in pair}
        if (anchor := self._anchors.pop(host, None)) is not None:
            anchor.release(give_up=silent)

    def _link_lost(self, one: str, other: str, task: int) -> None:
        """Record that two hosts are not connected any more by the link that they had in a task.

        Both say so: what the later one says is perhaps of a link that has been replaced since.
        """
        pair = min(one, other), max(one, other)
        if task > self._linked.get(pair, task):
            del self._linked[pair]

    def take_notes(self) -> list[str]:
        notes, self._notes = self._notes, []
        return notes

    def ended(self, milliseconds: float = 0) -> bool:
        return False

    def invalidate_epoch(self) -> None:
        pass  # nodes know by themselves

    def check_size(self, world_size: int) -> None:
        if world_size != self.place.world_size:
            raise errors.HostBoundaryError(
                "the number of ranks of a session on hosts is fixed when it is made: make another one, as "
                "with `%parallel_cluster --ranks-per-host 4 client` or Session(cluster=client, "
                "ranks_per_host=4)"
            )

    def resize(self, world_size: int, interrupts: InterruptCounter) -> None:
        self.check_size(world_size)

    def end(self, rank: int | None) -> None:
        """Restart a rank, or all."""
        hosts = self.place.hosts if rank is None else (self.place.host_of(rank),)
        self.epoch += 1
        self.ask("restart", dict.fromkeys(hosts, (rank,)), START_SECONDS)
        self._forget(self.ranks if rank is None else [rank])

    def close(self) -> None:
        self.closed = True
        self.pool = None
        self.wake()

    def stop(self) -> None:
        self.cluster.close()  # which releases every anchor

    def _release(self) -> None:
        anchors, self._anchors, self.starting = self._anchors, {}, ()
        do_all(*(anchor.release for anchor in anchors.values()))


def host_loss(host: str, ranks: Sequence[int], reason: str, advice: str = "") -> errors.HostLostError:
    """Return the error about a host that is lost with these ranks."""
    message = f"host {host} is lost, and {rank_list(ranks)} with it: {reason}{advice}"
    return errors.HostLostError(message, host=host, ranks=tuple(ranks), reason=reason)
