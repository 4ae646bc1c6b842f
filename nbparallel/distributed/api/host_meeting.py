"""Meeting of all ranks of several hosts: what each calls, and whether that is the same everywhere."""

from __future__ import annotations

import contextlib
import pickle
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from nbparallel.distributed.collectives.group_collectives import GroupCollectives
from nbparallel.distributed.runtime.host_door import HostDoor
from nbparallel.distributed.runtime.rank_context import RankContext
from nbparallel.distributed.slots.fingerprint import Fingerprint
from nbparallel.distributed.slots.mismatch import DIFFERENT, Row, parse, table
from nbparallel.errors import (
    LEFT_OUT,
    CollectiveMismatchError,
    CollectiveTimeoutError,
    HostLostError,
    NbParallelError,
    PeerFailedError,
    rank_list,
)
from nbparallel.wire.control import Operation, State
from nbparallel.wire.frames import DoorKind, Octets
from nbparallel.wire.identity import WorldPlace

TOLD_NS = 3_000_000_000
"""How long the reason may take to come from the notebook after a host has ended its part of a cell badly."""
Form = tuple[str, tuple[int, ...]] | None
"""Dtype and shape of an array; None: something else."""


class HostCall(NamedTuple):
    """One rank's call, as the ranks of other hosts know it."""

    word: int
    """Equal for calls that match."""
    content: object
    """What is combined: dtype and shape; None: left open."""
    text: bytes
    """The columns of the table in an error message."""
    line: int
    calls: int
    """How many this rank has made in the cell."""
    brought: tuple[Form, ...]
    """The forms that it sends: none, one for all takers, or one for each rank."""
    expected: dict[int, Form]
    """The forms of the arrays to fill, by the rank whose value they take."""
    value: Any
    """A number to combine, or several."""


class HostMeeting:
    """One rank's part in the meetings of one cell.

    Parameters
    ----------
    door : HostDoor or None
        The way to the leaders of other hosts; None: another rank of this host is its leader.
    """

    def __init__(self, context: RankContext, place: WorldPlace, door: HostDoor | None) -> None:
        self._context, self._place, self.door = context, place, door
        self.hosts = [range(*place.firsts[index : index + 2]) for index in range(len(place.hosts))]
        """The ranks of each host."""
        self._others = [rank for rank in range(place.world_size) if rank != context.rank]
        self._calls = self._line = 0
        self._operation, self._local_calls = Operation.none, list[bytes]()

    def meet(
        self,
        local: GroupCollectives,
        operation: Operation,
        label: Fingerprint,
        until: int | None,
        *,
        content: object = None,
        brought: tuple[Form, ...] = (),
        expected: Mapping[int, Form] | None = None,
        value: Any = None,
    ) -> list[HostCall]:
        """Wait for all ranks, and return what each calls; raises alike on all if that does not fit."""
        self._calls += 1
        line = self._context.call_site.line()
        mine = HostCall(
            label.call, content, label.text, line, self._calls, brought, dict(expected or {}), value
        )
        here = local.meet(operation, label, pickle.dumps(mine, 5), until)
        self._operation, self._line, self._local_calls = operation, line, here
        with self.agreed():
            packed = b""
            if self.door is not None:
                packed = self._ask_others(until)
            # Without the deadline: a leader that gives up says so, and all ranks of its host raise the same.
            found = pickle.loads(local.meet(operation, label, packed, None)[0])
            if isinstance(found, NbParallelError):
                raise found
            calls: list[HostCall] = [pickle.loads(call) for call in found]
            if what := _difference(calls, operation):
                raise CollectiveMismatchError(f"{what}:\n{self._table(dict(enumerate(calls)))}")
        return calls

    def _table(self, calls: Mapping[int, HostCall], absent: Sequence[int] = ()) -> str:
        name = self._context.call_site.name
        rows: dict[int, Row] = {
            rank: (*parse(call.text, name(call.line)), str(call.calls)) for rank, call in calls.items()
        }
        columns = len(next(iter(rows.values()))) - 1
        return table(rows | dict.fromkeys(absent, ("finished the cell", *"-" * columns)))

    @contextlib.contextmanager
    def agreed(self) -> Iterator[None]:
        """Have what raises end all operations of the cell on this rank: others count on it from here on."""
        try:
            yield
        except BaseException:
            self._context.open = self._context.open or -1
            raise

    # -- leaders only ----------------------------------------------------------------------------------------

    def _ask_others(self, until: int | None) -> bytes:
        """Return the calls of all ranks, or the error that all ranks of this host are to raise."""
        mine, count = self._local_calls, len(self.hosts)
        try:
            came = self.exchange(dict.fromkeys(range(count), mine), until)
        except (CollectiveTimeoutError, CollectiveMismatchError, HostLostError) as error:
            return pickle.dumps(error)
        return pickle.dumps([bytes(call) for host in range(count) for call in came.get(host, mine)], 5)

    def exchange(
        self, outgoing: Mapping[int, Sequence[Octets]], until: int | None
    ) -> dict[int, list[memoryview]]:
        """Send each host its buffers, and return those of each: a step of the call that was made last."""
        assert self.door is not None, "only leaders exchange"
        context, rank, began = self._context, self._context.rank, time.monotonic_ns()
        context.view.write_slot(
            rank, context.cell.number, State.WAITING, self._operation, line=self._line,
            deadline=until is not None,
        )  # fmt: skip
        context.open = -1
        try:
            found = self.door.exchange(outgoing, lambda missing: self._check(missing, began, until))
        finally:
            if not context.forked:
                context.waiter.wait_ns += time.monotonic_ns() - began
                context.write_timing()
                context.at_line(context.cell.statement, context.cell.last_line)
        context.open = 0
        return found

    def _check(self, missing: Sequence[int], began: int, until: int | None) -> None:
        """Raise if the hosts that are missing will not send what this one waits for, or not in time."""
        context, door = self._context, self.door
        context.check_peers(self._others)
        if (lost := context.peers.lost()) is not None:
            raise lost
        for host in missing:
            if door is not None and host in door.ended:
                raise self._never(host, door.ended[host])
        if until is not None and missing and time.monotonic_ns() >= until:
            ranks = rank_list(rank for host in missing for rank in self.hosts[host])
            seconds = (time.monotonic_ns() - began) / 1e9
            call = f"{self._operation.name}{context.call_site.place(self._line)}"
            message = f"{call}: timed out after {seconds:.1f} s; {ranks} did not arrive"
            raise CollectiveTimeoutError(message)
        context.hooks.progress()

    def _never(self, host: int, kind: DoorKind) -> NbParallelError:
        """Return why a host will send nothing more; rather what the notebook says of it, if that comes."""
        name, ranks, operation = self._place.hosts[host], self.hosts[host], self._operation.name
        if kind is DoorKind.ENDED:
            calls = dict(enumerate(map(pickle.loads, self._local_calls), self._place.ranks.start))
            return CollectiveMismatchError(
                f"{rank_list(ranks)} {LEFT_OUT} {operation}, for which the others wait:\n"
                f"{self._table(calls, ranks)}"
            )
        limit = time.monotonic_ns() + TOLD_NS
        while time.monotonic_ns() < limit:
            self._context.check_peers(self._others)
            time.sleep(0.01)
        if kind is DoorKind.FAILED:
            return PeerFailedError(f"{rank_list(ranks)} ended the cell with an error", rank=ranks[0])
        reason = "the link between the hosts is closed"
        message = f"{operation} needs {rank_list(ranks)}, and {reason}"
        return HostLostError(message, host=name, ranks=tuple(ranks), reason=reason)


def _difference(calls: Sequence[HostCall], operation: Operation) -> str:
    """Return what does not fit; nothing if all does."""
    if len({call.word for call in calls}) > 1 or len({call.content for call in calls}) > 1:
        return DIFFERENT
    for reader, call in enumerate(calls):
        for source, form in call.expected.items():
            brought = calls[source].brought
            if form != brought[reader if len(brought) > 1 else 0]:
                return (
                    f"what {rank_list([source])} passed to {operation.name} does not fit the array that "
                    f"{rank_list([reader])} gave to take it"
                )
    return ""
