"""Collectives over several hosts: ranks of a host meet, their leader meets the other leaders.

::

    inside   every rank gives its leader, the host's first rank, the description of its call
    between  the leaders exchange these descriptions
    inside   every rank gets all of them, and compares: a difference is seen by all alike, and no array was
             touched; of a barrier that is all
    inside   the ranks' values come together at the leader, combined if they are to be
    between  the leaders exchange them
    inside   the ranks take what is theirs

Arrays to combine of at most `SMALL_NBYTES` travel with the descriptions, as numbers do, and are combined by
every rank: one exchange instead of two.

Inside, these are operations of the host's ranks as on one machine; between, messages.  Values are combined
rank by rank inside a host, then host by host, so that every rank gets the same bits.
"""

from __future__ import annotations

import contextlib
import functools
import pickle
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from nbparallel import errors
from nbparallel.cluster.host_place import LINK, HostPlace
from nbparallel.distributed.arguments import part_of
from nbparallel.distributed.collectives import movements
from nbparallel.distributed.collectives.group_collectives import GroupCollectives, GroupState
from nbparallel.distributed.data_parallel.gradients import Gradients, average_declared, check_declarations
from nbparallel.distributed.operators import Operator, find_operator, finish_array, operator_for
from nbparallel.distributed.point_to_point.endpoints import Receiver, Sender
from nbparallel.distributed.runtime.rank_context import RankContext
from nbparallel.distributed.runtime.shared_arrays import AnyArray, as_operand, as_plain_array, copied
from nbparallel.distributed.runtime.waiting import WaitRecord
from nbparallel.distributed.slots.mismatch import DIFFERENT, Row, parse, table
from nbparallel.distributed.slots.slot_area import Fingerprint, fingerprint
from nbparallel.errors import LEFT_OUT, rank_list
from nbparallel.sharing.tensors import is_module, is_tensor
from nbparallel.transfer import pickling
from nbparallel.transfer.pickle_format import BY_VALUE
from nbparallel.wire.control import Operation
from nbparallel.wire.frames import Octets

# Meeting of all ranks of several hosts: what each calls, and whether that is the same everywhere.

Form = tuple[str, tuple[int, ...]] | None
"""Dtype and shape of an array; None: something else."""


class HostCall(NamedTuple):
    """One rank's call, as the ranks of other hosts know it."""

    word: int
    """Equal for calls that match."""
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


WHOLE_NBYTES = 1 << 20
"""Up to this size every leader combines all itself: one exchange instead of two."""
SMALL_NBYTES = 512
"""Up to this size every rank does, and what it combines travels with the calls: no exchange but that."""
TOGETHER_NBYTES = 16 << 10
"""What a leader sends to another travels in one message up to this size."""
BUILT = frozenset({
    "barrier", "monitored_barrier", "broadcast", "reduce", "all_reduce", "gather", "all_gather", "scatter",
    "reduce_scatter", "all_to_all", "all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single",
    "all_gather_object", "gather_object", "scatter_object_list", "broadcast_object_list", "scan", "exscan",
    "split",
})  # fmt: skip
"""What users call; others work inside a host."""
_SCANS = frozenset({Operation.scan, Operation.exscan})
_ALIKE = _SCANS | {Operation.broadcast, Operation.all_gather}
"""Movements of which all ranks take the same values."""


class HostOperations:
    """One rank's side of the collectives of a group over hosts, in one cell.

    Each takes the collectives of the host's own members first, and the deadline last.  The members are
    `ranks`, in ascending order, by default all; `word` is the group of the messages between leaders, and
    those of users are odd.
    """

    def __init__(
        self, context: RankContext, place: HostPlace, sender: Sender, receiver: Receiver, word: int = 2,
        ranks: Sequence[int] | None = None,
    ) -> None:  # fmt: skip
        self._context, self._place, self._word = context, place, word
        self._sender, self._receiver = sender, receiver
        self._ranks = ranks or range(place.world_size)
        parts = [[i for i, rank in enumerate(self._ranks) if rank in part] for part in place.parts.values()]
        self._hosts = [range(part[0], part[-1] + 1) for part in parts if part]
        """The members of each host, by their places in the group."""
        self._rank, self._size = self._ranks.index(context.rank), len(self._ranks)
        self._here = next(i for i, part in enumerate(self._hosts) if self._rank in part)
        self._leads = self._rank == self._hosts[self._here].start
        self._calls = self._line = 0
        self._operation, self._local_calls = Operation.none, list[bytes]()
        self._described = movements.Calls(self._ranks, self._rank)
        self._groups: dict[int, HostOperations | None] = {}

    def of(self, state: GroupState) -> HostOperations | None:
        """Return the operations of a group; None if its members share memory."""
        if not state.word:
            return self
        if state.word not in self._groups:
            inside = all(rank in self._place.ranks for rank in state.ranks)
            if not inside and list(state.ranks) != sorted(state.ranks):
                raise errors.HostBoundaryError(
                    f"ranks of a group over several hosts are in ascending order, not {list(state.ranks)}: "
                    "leave `key` out of split"
                )
            ends = self._sender, self._receiver, state.word ^ 1
            found = None if inside else HostOperations(self._context, self._place, *ends, state.ranks)
            self._groups[state.word] = found
        return self._groups[state.word]

    def close(self) -> None:
        """Close this rank's way to its node (idempotent)."""
        self._context.mail.close()

    def check(self, name: str, *, async_op: bool, view: bool) -> bool:
        """Whether the operation of this name is built; raises if it is not in this form."""
        if name in BUILT and (async_op or view):
            form = "async_op" if async_op else "view"
            raise self._inside_only(f"{name}({form}=True)", f"leave {form} out")
        return name in BUILT

    def _inside_only(self, what: str, instead: str) -> errors.HostBoundaryError:
        """Return the error about a form that is not built over hosts, and what to do instead."""
        return errors.HostBoundaryError(
            f"{what} on host {self._place.name} needs a group of this host's ranks: {instead}, or pass "
            "group=dist.host_group()"
        )

    # -- operations, described in `GroupCollectives` -------------------------------------------------------

    def barrier(self, local: GroupCollectives, until: int | None) -> None:
        self.exchange_values(local, Operation.barrier, None, until)

    def monitored_barrier(self, local: GroupCollectives, until: int | None) -> None:
        self.exchange_values(local, Operation.monitored_barrier, None, until)

    def exchange_values(
        self, local: GroupCollectives, operation: Operation, value: Any, until: int | None
    ) -> list[Any]:
        calls = self._meet(local, operation, fingerprint(operation.name), until, value=value)
        return [call.value for call in calls]

    def broadcast(self, local: GroupCollectives, x: Any, root: int, until: int | None) -> Any:
        if is_module(x):
            instead = "broadcast its state_dict(), which every rank loads"
            raise self._inside_only("broadcast of a module of torch", instead)
        return self._perform(local, self._described.broadcast(x, root), until)

    def move(self, local: GroupCollectives, *args: Any) -> Any:
        *passed, until = args
        return self._perform(local, self._described.move(*passed), until)

    def scan(self, local: GroupCollectives, x: Any, op: str, until: int | None) -> Any:
        return self._perform(local, self._described.scan(x, op), until)

    def exscan(self, local: GroupCollectives, x: Any, op: str, until: int | None) -> Any:
        return self._perform(local, self._described.exscan(x, op), until)

    def all_reduce(self, local: GroupCollectives, x: Any, op: str, until: int | None) -> Any:
        operator, value = movements.checked_value(x, op, "all_reduce", fills=True)
        total = self._combine(local, Operation.all_reduce, operator, value, until)
        return x if isinstance(value, np.ndarray) else total

    def reduce(self, local: GroupCollectives, x: Any, root: int, op: str, until: int | None) -> Any:
        operator, value = movements.checked_value(x, op, "reduce", fills=False)
        own = value.copy() if isinstance(value, np.ndarray) else value
        total = self._combine(local, Operation.reduce, operator, own, until, root=self._ranks[root])
        return movements.into_operand(x, total) if self._rank == root else None

    def reduce_scatter(
        self, local: GroupCollectives, parts: Sequence[Any], whole: AnyArray | None, op: str,
        output: AnyArray | None, until: int | None,
    ) -> Any:  # fmt: skip
        operation, rank = Operation.reduce_scatter, self._rank
        operator, values = movements.checked_parts(parts, whole, op, output, rank)
        mine = values[rank]
        if not isinstance(mine, np.ndarray):
            total = self._combine(local, operation, operator, values, until)
            return total if output is None else movements.into_operand(output, total)
        shape = whole.shape if whole is not None else tuple(array.shape for array in values)
        flat = np.concatenate([array.reshape(-1) for array in values], dtype=mine.dtype)
        self._combine(local, operation, operator, flat, until, shape=shape)
        start = sum(array.size for array in values[:rank])
        found = flat[start : start + mine.size].reshape(mine.shape)
        return found.copy() if output is None else movements.into_operand(output, found)

    def average(self, local: GroupCollectives, gradients: Gradients, until: int | None) -> None:
        """Replace arrays by their averages; what ranks declare of them travels with the calls."""
        operation, mine = Operation.average_gradients, gradients.declaration(self._context.memory)
        calls = self._meet(local, operation, gradients.plan.label, until, value=mine)
        declared = []
        for host, ranks in enumerate(self._hosts):
            for rank in ranks:
                word, weight, spans = calls[rank].value
                declared.append((word, weight, [(one + (host << 64), *span) for one, *span in spans]))
        _, total = check_declarations(declared, self._ranks)

        def reduce(flat: AnyArray, op: str) -> None:
            operator = operator_for(find_operator(op), flat.dtype)
            self._combine(local, operation, operator, flat, until)

        average_declared(gradients, total, reduce)

    # -- values --------------------------------------------------------------------------------------------

    def _perform(self, local: GroupCollectives, call: movements.Call, until: int | None) -> Any:
        """Meet, move values as a call says, and return what it does."""
        movement, complete = call
        if movement.operation in _SCANS and not isinstance(movement.values[0], np.ndarray):
            mine, label = movement.values[0], movement.fingerprint  # a number travels with the call
            calls = self._meet(local, movement.operation, label, until, value=mine)
            return complete([calls[source].value for source in movement.sources])
        outputs, expected = movement.outputs, {at: _form(array) for at, array in movement.outputs.items()}
        brought = tuple(map(_form, movement.values))
        self._meet(local, movement.operation, movement.fingerprint, until, brought=brought, expected=expected)
        with self._agreed():
            found = self._carry(local, movement, until)
            for place, source in enumerate(movement.sources if outputs else ()):
                array = as_operand(found[place])
                assert array is not None, "the forms were compared"
                np.copyto(outputs[source], array)
                found[place] = outputs[source]
            return complete(found)

    def _carry(self, local: GroupCollectives, movement: movements.Movement, until: int | None) -> list[Any]:
        """Bring values to their takers by the leaders; returns what came, in the order of the sources."""
        takes: Sequence[int | None] = [movement.root] if movement.to_root else range(self._size)
        rows = local.move(movements.GATHER, (list(map(self._plain, movement.values)),), (), 0, False, None)
        parts: list[list[Any]] = []
        if self._leads:
            # Of each rank that sends, what all take or, if it has a value for each rank, theirs.
            outgoing = [
                [row if len(row) <= 1 else list(row[ranks.start : ranks.stop]) for row in rows if row]
                if any(rank in takes for rank in ranks)
                else []
                for ranks in self._hosts
            ]
            packed = [
                [pickling.dumps(some, BY_VALUE).data] if host != self._here else []
                for host, some in enumerate(outgoing)
            ]
            came = self._exchange(packed, until)
            given = list[Any]()
            for host, some in enumerate(outgoing):
                given += some if host == self._here else pickling.loads(came[host][0], self._context.store)
            parts = [
                [row[0 if len(row) == 1 else place] for row in given] if rank in takes else []
                for place, rank in enumerate(self._hosts[self._here])
            ]
        if movement.operation in _ALIKE:
            found = local.broadcast(parts[0] if parts else None, 0, None)
        else:
            found = local.move(movements.SCATTER, parts, (), 0, False, None)
        return list(found[: len(movement.sources)])

    def _plain(self, x: Any) -> Any:
        """Return a value as it travels inside a list: no array as the memory that ranks share."""
        array = as_plain_array(x)
        if array is not None and self._context.memory.span_of(array) is not None:
            x = copied(x)
            array = as_plain_array(x)
        return x if array is None or is_tensor(x) else np.asarray(array, order="C")

    def _combine(
        self, local: GroupCollectives, operation: Operation, operator: Operator, value: Any,
        until: int | None, *, root: int | None = None, shape: tuple[Any, ...] | None = None,
    ) -> Any:  # fmt: skip
        """Meet, and combine an array of all ranks, on every one in place; or numbers, of lists each's own.

        An error names the array by its `shape`, or this one.
        """
        if not isinstance(value, np.ndarray):
            return self._numbers(local, operation, operator, value, until, root)
        flat = np.ascontiguousarray(value).reshape(-1)
        # Hosts may differ in the last bits of some products: then one of them combines each part.
        alike = flat.dtype.kind not in operator.inexact_kinds
        small = alike and flat.nbytes <= SMALL_NBYTES
        label = movements.array_label(operation.name, operator.name, flat.dtype, shape or value.shape, root)
        calls = self._meet(local, operation, label, until, value=flat.tobytes() if small else None)
        with self._agreed():
            if small:
                parts = [np.empty_like(flat) for _ in self._hosts]
                for ranks, part in zip(self._hosts, parts, strict=True):
                    _fold(operator, [np.frombuffer(calls[rank].value, flat.dtype) for rank in ranks], part)
                _fold(operator, parts, flat)
            else:
                step = "sum" if operator.finish is not None else operator.name  # which comes at the end
                local.reduce(flat, 0, step, None)
                if self._leads:
                    self._combine_hosts(operator, flat, alike, until)
                local.broadcast(flat, 0, None)
            with np.errstate(all="ignore"):
                finish_array(operator, flat, self._size)
        if not np.may_share_memory(flat, value):
            value[...] = flat.reshape(value.shape)
        return value

    def _combine_hosts(self, operator: Operator, flat: AnyArray, alike: bool, until: int | None) -> None:
        """Combine the arrays of all leaders, on every one in place."""
        count = len(self._hosts)
        whole = alike and flat.nbytes <= WHOLE_NBYTES
        bounds = [slice(None) if whole else part_of(flat.size, host, count) for host in range(count)]
        came = self._exchange([[flat[part].view(np.uint8).data] for part in bounds], until)
        mine = flat[bounds[self._here]]
        others = {host: np.frombuffer(octets[0], mine.dtype) for host, octets in came.items()}
        _fold(operator, [others.get(host, mine) for host in range(count)], mine)
        if not whole:
            for host, octets in self._exchange([[mine.view(np.uint8).data]] * count, until).items():
                flat[bounds[host]] = np.frombuffer(octets[0], flat.dtype)

    def _numbers(
        self, local: GroupCollectives, operation: Operation, operator: Operator, value: Any,
        until: int | None, root: int | None,
    ) -> Any:  # fmt: skip
        """Combine numbers, which travel with the calls; of lists each rank's element."""
        shown = "numbers" if isinstance(value, list) else type(value).__name__
        label = movements.number_label(operation.name, shown, operator.name, root)
        calls = self._meet(local, operation, label, until, value=value)
        totals = []
        for ranks in self._hosts:
            values = [calls[rank].value for rank in ranks]
            own = [each[self._rank] if isinstance(each, list) else each for each in values]
            totals.append(functools.reduce(operator.pair, own))
        total = functools.reduce(operator.pair, totals)
        return total if operator.finish is None else operator.finish(total, self._size)

    # -- meeting -------------------------------------------------------------------------------------------

    def _meet(
        self, local: GroupCollectives, operation: Operation, label: Fingerprint, until: int | None,
        *, brought: tuple[Form, ...] = (), expected: Mapping[int, Form] | None = None, value: Any = None,
    ) -> list[HostCall]:  # fmt: skip
        """Wait for all ranks, and return what each calls; raises alike on all if that does not fit."""
        self._calls += 1
        line = self._context.call_site.line()
        mine = HostCall(label.word, label.text, line, self._calls, brought, dict(expected or {}), value)
        label = replace(label, word=label.call, content=0)  # of all ranks: the table is to have them all
        here = local.meet(operation, label, pickle.dumps(mine, 5), until)
        self._operation, self._line, self._local_calls = operation, line, here
        with self._agreed():
            packed = self._ask_others(until) if self._leads else b""
            # Without the deadline: a leader that gives up says so, and all ranks of its host raise the same.
            found = pickle.loads(local.meet(operation, label, packed, None)[0])
            if isinstance(found, errors.NbParallelError):
                raise found
            calls: list[HostCall] = [pickle.loads(call) for call in found]
            if what := self._difference(calls, operation):
                raise errors.CollectiveMismatchError(f"{what}:\n{self._table(dict(enumerate(calls)))}")
        return calls

    def _table(self, calls: Mapping[int, HostCall], absent: Sequence[int] = ()) -> str:
        name = self._context.call_site.name
        rows: dict[int, Row] = {
            self._ranks[rank]: (*parse(call.text, name(call.line)), str(call.calls))
            for rank, call in calls.items()
        }
        columns = len(next(iter(rows.values()))) - 1
        return table(rows | dict.fromkeys(absent, ("finished the cell", *"-" * columns)))

    def _difference(self, calls: Sequence[HostCall], operation: Operation) -> str:
        """Return what does not fit; nothing if all does."""
        if len({call.word for call in calls}) > 1:
            return DIFFERENT
        for reader, call in enumerate(calls):
            for source, form in call.expected.items():
                brought = calls[source].brought
                if form != brought[reader if len(brought) > 1 else 0]:
                    return (
                        f"what {rank_list([self._ranks[source]])} passed to {operation.name} does not fit "
                        f"the array that {rank_list([self._ranks[reader]])} gave to take it"
                    )
        return ""

    @contextlib.contextmanager
    def _agreed(self) -> Iterator[None]:
        """Have what raises end all operations of the cell on this rank: others count on it from here on."""
        try:
            yield
        except BaseException:
            self._context.open = self._context.open or -1
            raise

    # -- leaders only ----------------------------------------------------------------------------------------

    def _ask_others(self, until: int | None) -> bytes:
        """Return the calls of all ranks, or the error that all ranks of this host are to raise."""
        mine, count = self._local_calls, len(self._hosts)
        try:
            came = self._exchange([mine] * count, until)
        except (errors.CollectiveTimeoutError, errors.CollectiveMismatchError, errors.HostLostError) as error:
            return pickle.dumps(error)
        return pickle.dumps([bytes(call) for host in range(count) for call in came.get(host, mine)], 5)

    def _exchange(
        self, outgoing: Sequence[Sequence[Octets]], until: int | None
    ) -> dict[int, list[memoryview]]:
        """Send each other host its buffers, and return those of each: a step of the last call."""
        context, sender = self._context, self._sender
        others = {host: [self._ranks[i] for i in part] for host, part in enumerate(self._hosts)}
        del others[self._here]
        strict, operations, sender.strict, context.open = sender.strict, context.operations, False, -1
        try:
            for host, ranks in others.items():
                self._send(ranks[0], [memoryview(each).cast("B") for each in outgoing[host]])
            found = {host: self._take(ranks, until) for host, ranks in others.items()}
        except errors.PeerFailedError as error:
            if LINK not in str(error):
                raise
            reason = f"{self._operation.name} needs {str(error).replace(' cannot be reached: ', ', and ')}"
            name, lost = self._place.host_of(error.rank), tuple(self._place.around(error.rank))
            raise errors.HostLostError(reason, host=name, ranks=lost, reason=LINK) from error
        finally:
            sender.strict, context.operations = strict, operations
        context.open = 0
        return found

    def _send(self, leader: int, buffers: Sequence[memoryview]) -> None:
        """Send buffers: short ones in one message, else each in one."""
        if sum(map(len, buffers)) <= TOGETHER_NBYTES:
            messages: Sequence[Any] = [list(map(bytes, buffers))]
        else:
            messages = [len(buffers), *(np.frombuffer(each, np.uint8) for each in buffers)]
        for message in messages:
            self._sender.send(message, leader, 0, view=False, deadline_ns=None, group=self._word)

    def _take(self, ranks: list[int], until: int | None) -> list[memoryview]:
        """Return what the leader of these ranks has sent; until then wait for them all."""
        leader = ranks[0]
        ring = self._receiver.rings[leader]
        find = functools.partial(self._receiver.unexpected.find, leader, 0, self._word)
        awaited = lambda: [] if ring.has_message() else ranks  # noqa: E731
        step = self._operation, awaited, self._explain, self._line
        wait = functools.partial(WaitRecord, *step, peer=leader, deadline_ns=until)
        if find() is None:
            self._receiver.wait_for(ring.has_message, leader, [leader], wait, find)
        receive = functools.partial(self._receiver.recv, None, leader, 0, None, group=self._word)
        came, _ = receive()
        if isinstance(came, int):
            came = [receive()[0] for _ in range(came)]
        return [memoryview(each) for each in came]

    def _explain(self, finished: list[int]) -> errors.NbParallelError:
        calls = dict(enumerate(map(pickle.loads, self._local_calls), self._hosts[self._here].start))
        return errors.CollectiveMismatchError(
            f"{rank_list(finished)} {LEFT_OUT} {self._operation.name}, for which the others wait:\n"
            f"{self._table(calls, finished)}"
        )


def _form(x: Any) -> Form:
    array = as_plain_array(x)
    return None if array is None else (str(array.dtype), array.shape)


def _fold(operator: Operator, arrays: Sequence[AnyArray], out: AnyArray) -> None:
    """Combine arrays one by one, in order, into `out`, which may be one of them."""
    total = arrays[0]
    room = np.empty_like(out) if any(other is out for other in arrays[2:]) else out
    with np.errstate(all="ignore"):
        for other in arrays[1:]:
            total = operator.ufunc(total, other, out=room)
    if total is not out:
        out[...] = total
