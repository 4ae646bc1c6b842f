"""A process group of torch whose operations are those of `nbparallel.distributed`.

torch calls these methods, under these names, with lists of tensors: from Python, and from C++ code in
backward passes of DistributedDataParallel.  Roots and peers are ranks of the group.
"""

from __future__ import annotations

import datetime
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, ClassVar

import numpy as np
import torch
from torch._C._distributed_c10d import Reducer
from torch.distributed import ProcessGroup, ReduceOptions, Work
from torch.distributed.constants import default_pg_timeout
from torch.futures import Future

from nbparallel import distributed
from nbparallel.distributed import Communicator, Group
from nbparallel.distributed.arguments import overlapping_pair, rows_of
from nbparallel.distributed.work import Work as Operation
from nbparallel.errors import StaleWorkError
from nbparallel.sharing.tensors import array_of as as_array
from nbparallel.torch_backend.operands import (
    broadcast_operand,
    each_row,
    fill_repeated,
    filled,
    member_rows,
    one_tensor,
    operator_of,
    sum_sparse,
)

# What the operations of the backend return to torch.
#
# A collective with ``async_op=True`` is *deferred*: it runs when it is waited for, before the next
# operation that blocks, or when the cell ends, in the order in which the program has begun them.  So all
# ranks run them alike, whichever of them waits first, and by the algorithms of operations that block; no
# thread makes progress behind the user's back.  torch's DistributedDataParallel asks for a future of each
# bucket of gradients, which runs its reduction there, in the middle of the backward pass.

NO_TIME = datetime.timedelta(0)
"""What torch's C++ code passes for no time-out."""


class BackendWork(Work):
    """An operation that has ended; the base of those that have not.

    Parameters
    ----------
    value : list of tensors
        What it fills.
    """

    def __init__(self, value: Any = None) -> None:
        super().__init__()
        self._value = value

    def wait(self, timeout: datetime.timedelta = NO_TIME) -> bool:
        """Return True when the operation has ended; it can be called again."""
        return True

    def synchronize(self) -> None:
        """Do the same as `wait`."""
        self.wait()

    def is_completed(self) -> bool:
        """Return whether `wait` would return, or raise, immediately."""
        return True

    def is_success(self) -> bool:
        """Return whether the operation has ended well."""
        return self.is_completed() and self.exception() is None

    def exception(self) -> BaseException | None:
        """Return the error of an operation that has failed, else None."""
        return None

    def result(self) -> Any:
        """Wait, and return the tensors that were filled."""
        self.wait()
        return self._value

    def source_rank(self) -> int:
        """Return the place in the group of a message's sender; -1 for anything but a receive."""
        return -1

    def _source_rank(self) -> int:
        return self.source_rank()

    def get_future(self) -> Any:
        """Return a future of the tensors; it is completed.

        torch's futures wait in C++ code, where nothing could make progress, and no interrupt would end it.
        """
        future: Any = Future()
        future.set_result(self.result())
        return future


DONE = BackendWork()
"""Of an operation that has filled what the caller has."""


class MessageWork(BackendWork):
    """A message under way.

    Parameters
    ----------
    operation : Work of nbparallel.distributed
        What was begun.
    timeout : float or None
        The group's, in seconds.
    place : callable
        Returns a rank's place in the group.
    """

    def __init__(
        self, operation: Operation, value: Any, timeout: float | None, place: Callable[[int], int]
    ) -> None:
        super().__init__(value)
        self._operation, self._timeout, self._place = operation, timeout, place

    def wait(self, timeout: datetime.timedelta = NO_TIME) -> bool:
        """Return True when it has arrived.

        Raises
        ------
        NbParallelError
            As `nbparallel.distributed.recv`; after a time-out it can be called again.
        """
        if not self._operation.done:
            Deferred.run_all()
        return self._operation.wait(timeout.total_seconds() if timeout > NO_TIME else self._timeout)

    def is_completed(self) -> bool:
        """Return whether `wait` would return, or raise, immediately."""
        return self._operation.is_completed()

    def exception(self) -> BaseException | None:
        """Return its error, if it has failed."""
        return self._operation.exception()

    def source_rank(self) -> int:
        """Wait, and return the place of the sender in the group."""
        self.wait()
        return self._place(self._operation.source_rank())


deferred: deque[Deferred] = deque()
"""Collectives of this process that were begun and have not run, in the order in which they were begun."""


class Deferred(BackendWork):
    """A collective that was begun, and runs later."""

    _turn: ClassVar[threading.RLock] = threading.RLock()
    """Of the thread that runs them: another one that waits for the same work waits for it."""

    def __init__(self, run: Callable[[], None], value: Any, communicator: Communicator) -> None:
        super().__init__(value)
        self._run: Callable[[], None] | None = run
        self._error: BaseException | None = None
        if not deferred:
            communicator.at_end(Deferred.run_all, Deferred.drop_all)
        deferred.append(self)

    def wait(self, timeout: datetime.timedelta = NO_TIME) -> bool:
        """Run what was begun up to this operation; return True.

        Raises
        ------
        NbParallelError
            As the operation itself, of `nbparallel.distributed`.
        """
        if self._run is not None:
            with self._turn:
                while self._run is not None:
                    self._run_next()
        if self._error is not None:
            raise self._error
        return True

    def is_completed(self) -> bool:
        """Run what was begun up to this operation; return True: nothing goes on behind the user's back."""
        with suppress(Exception):  # `wait` raises it again
            self.wait()
        return True

    def exception(self) -> BaseException | None:
        """Return its error, if it has failed."""
        return self._error

    @classmethod
    def run_all(cls) -> None:
        """Run what was begun."""
        if deferred:
            with cls._turn:
                while deferred:
                    cls._run_next()

    @classmethod
    def drop_all(cls) -> None:
        """Forget what was begun: its cell has failed."""
        while deferred:
            work = deferred.popleft()
            work._run, work._error = None, StaleWorkError("it was begun in a cell that has failed since")

    @classmethod
    def _run_next(cls) -> None:
        work = deferred.popleft()
        assert work._run is not None, "what is in the queue has not run"
        try:
            work._run()
        except Exception as error:
            work._error = error
            raise
        except BaseException:  # an interrupt: of that cell, not of one that waits later
            work._error = StaleWorkError("its cell was interrupted while it ran")
            raise
        finally:
            work._run = None  # after it: `wait` of another thread looks here


Tensors = Sequence[Any]
Options = dict[str, Any]
NAME = "nbparallel"
_NO_OPTIONS: Options = {}
_CPU = torch.device("cpu")
_DEFAULT = ReduceOptions()  # has what all of them have: a sum, rank 0


class BackendGroup(ProcessGroup):
    """Some ranks as torch sees them.

    It belongs to no epoch: each operation looks for the communicator of its time, so that a group that was
    made before a failure works after it.

    Parameters
    ----------
    ranks : tuple of int
        The members, as ranks of our world, in the order of the group.
    name : str
        torch's name of the group, the same on all members.
    first : bool
        It is torch's world.
    timeout : float or None
        Of each operation, in seconds.
    leave : callable, optional
        Called when torch destroys the group.
    """

    def __init__(
        self,
        ranks: tuple[int, ...],
        index: int,
        *,
        name: str,
        first: bool,
        timeout: float | None,
        leave: Callable[[], None] | None = None,
    ) -> None:
        super().__init__(index, len(ranks))
        self.ranks, self.timeout, self._index, self._leave = ranks, timeout, index, leave
        communicator = distributed.current()
        whole = first and ranks == tuple(range(communicator.world_size))
        self.group = None if whole else Group(ranks, f"torch {name}")
        self._name = name

    # -- what torch asks -----------------------------------------------------------------------------------

    def rank(self) -> int:
        """Return this rank's place in the group."""
        return self._index

    def size(self) -> int:
        """Return the number of members."""
        return len(self.ranks)

    getRank, getSize = rank, size  # noqa: N815  their names in C++

    def name(self) -> str:
        """Return the name that users pass."""
        return NAME

    getBackendName = name  # noqa: N815

    @property
    def group_name(self) -> str:
        """Torch's name of the group."""
        return self._name

    @property
    def _device_types(self) -> list[Any]:
        return [_CPU]

    def _get_backend(self, device: Any) -> BackendGroup:
        return self

    def __repr__(self) -> str:
        return f"<torch process group of backend {NAME}, ranks {list(self.ranks)}>"

    def set_timeout(self, timeout: datetime.timedelta) -> None:
        """Set the time-out of later operations."""
        self.timeout = seconds_of(timeout)

    def shutdown(self) -> None:
        """Leave: what torch calls when the group is destroyed."""
        leave, self._leave = self._leave, None
        if leave is not None:
            leave()

    abort = shutdown

    # -- reductions ------------------------------------------------------------------------------------------

    def allreduce_coalesced(self, tensors: Tensors, opts: Any = _DEFAULT) -> Work:
        """Combine each tensor of all members in place."""
        operator, group = operator_of(opts.reduceOp), self.group
        values = [x if x.is_sparse else filled(x, "all_reduce", repeated=True) for x in tensors]
        tied = overlapping_pair([value for value in values if isinstance(value, np.ndarray)]) is not None

        def run(communicator: Communicator, options: Options) -> None:
            # of tied weights each is read before one is written, as gloo does
            totals = [
                x.copy() if isinstance(x, np.ndarray) and (tied or not x.flags.writeable) else x
                for x in values
            ]
            for total in totals:
                if isinstance(total, np.ndarray):
                    communicator.all_reduce(total, operator, group, **options)
                else:
                    sum_sparse(communicator, total, operator, {"group": group, **options})
            for tensor, value, total in zip(tensors, values, totals, strict=True):
                if total is not value and value.flags.writeable:
                    value[...] = total
                elif total is not value:
                    fill_repeated(tensor, value, total)

        return self._call(run, tensors, opts)

    @one_tensor(1, "op")
    def allreduce(self, tensors: Tensors, opts: Any = _DEFAULT) -> Work:
        """Combine a tensor of all members in place."""
        return self.allreduce_coalesced(tensors, opts)

    @one_tensor(1, "root", "op")
    def reduce(self, tensors: Tensors, opts: Any = _DEFAULT) -> Work:
        """Combine each tensor of all members, in place on one."""
        operator, root = operator_of(opts.reduceOp), self._member(opts.rootRank)
        fills = opts.rootRank == self._index
        arrays = [filled(tensor, "reduce") if fills else as_array(tensor) for tensor in tensors]
        return self._each("reduce", [(array, root, operator) for array in arrays], tensors, opts)

    @one_tensor(2, "op")
    def reduce_scatter(self, outputs: Tensors, inputs: Sequence[Tensors], opts: Any = _DEFAULT) -> Work:
        """Combine lists of tensors of all members; each keeps its own element."""
        operator = operator_of(opts.reduceOp)
        calls = [
            (filled(output, "reduce_scatter"), [as_array(part) for part in parts], operator)
            for output, parts in zip(outputs, inputs, strict=True)
        ]
        return self._each("reduce_scatter", calls, outputs, opts)

    def reduce_scatter_single(self, output: Any, input: Any, opts: Any = _DEFAULT) -> Work:
        """Combine one tensor of all members; each keeps its own part."""
        return self.reduce_scatter_single_coalesced([output], [input], opts)

    def reduce_scatter_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any = _DEFAULT
    ) -> Work:
        """Do this for several."""
        operator, calls = operator_of(opts.reduceOp), list[Any]()
        for output, whole in zip(outputs, inputs, strict=True):
            rows = member_rows(as_array(whole), output, self.size(), "reduce_scatter")
            parts: Any = each_row(rows)
            if rows.ndim > 1:
                parts = rows.reshape(len(rows) * rows.shape[1], *rows.shape[2:])
            calls.append((filled(output, "reduce_scatter"), parts, operator))
        return self._each("reduce_scatter", calls, outputs, opts)

    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    # -- movements -------------------------------------------------------------------------------------------

    @one_tensor(1, "root")
    def broadcast(self, tensors: Tensors, opts: Any = _DEFAULT) -> Work:
        """Fill each tensor with the root's."""
        root = self._member(opts.rootRank)
        calls = [(broadcast_operand(tensor), root) for tensor in tensors]
        return self._each("broadcast", calls, tensors, opts)

    @one_tensor(2)
    def allgather(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any = _DEFAULT) -> Work:
        """Fill lists of tensors with those of all members."""
        return self._all_gather_lists(outputs, inputs, opts)

    def _all_gather_lists(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any) -> Work:
        calls = [
            ([filled(target, "all_gather") for target in targets], as_array(x))
            for targets, x in zip(outputs, inputs, strict=True)
        ]
        return self._each("all_gather", calls, _flat(outputs), opts)

    def all_gather_single(self, output: Any, input: Any, opts: Any = _DEFAULT) -> Work:
        """Fill one tensor with those of all members."""
        return self.all_gather_single_coalesced([output], [input], opts)

    def all_gather_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = _DEFAULT) -> Work:
        """Do this for several."""
        calls = [
            (each_row(member_rows(filled(output, "all_gather"), x, self.size(), "all_gather")), as_array(x))
            for output, x in zip(outputs, inputs, strict=True)
        ]
        return self._each("all_gather", calls, outputs, opts)

    def allgather_coalesced(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any = _DEFAULT) -> Work:
        """Fill, for each member, a list of tensors."""
        lists = [[member[i] for member in outputs] for i in range(len(inputs))]
        return self._all_gather_lists(lists, inputs, opts)

    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced

    @one_tensor(2, "root")
    def gather(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any = _DEFAULT) -> Work:
        """Fill lists of tensors of one member with those of all."""
        root = self._member(opts.rootRank)
        rows: list[Any] = [[filled(target, "gather") for target in targets] for targets in outputs]
        pairs = zip(inputs, rows or [None] * len(inputs), strict=True)
        return self._each("gather", [(as_array(x), row, root) for x, row in pairs], _flat(outputs), opts)

    @one_tensor(2, "root")
    def scatter(self, outputs: Tensors, inputs: Sequence[Tensors], opts: Any = _DEFAULT) -> Work:
        """Fill each member's tensor with its element of one member's list."""
        root = self._member(opts.rootRank)
        values: list[Any] = [[as_array(part) for part in parts] for parts in inputs]
        pairs = zip(outputs, values or [None] * len(outputs), strict=True)
        calls = [(filled(output, "scatter"), parts, root) for output, parts in pairs]
        return self._each("scatter", calls, outputs, opts)

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = _DEFAULT) -> Work:
        """Give every member one tensor of every member."""
        targets = [filled(output, "all_to_all") for output in outputs]
        return self._each("all_to_all", [(targets, [as_array(x) for x in inputs])], outputs, opts)

    def all_to_all_single(
        self,
        output: Any,
        input: Any,
        output_split_sizes: Sequence[int],
        input_split_sizes: Sequence[int],
        opts: Any = _DEFAULT,
    ) -> Work:
        """Give every member some rows of a tensor."""
        name, size = "all_to_all_single", self.size()
        targets = rows_of(filled(output, name), output_split_sizes or None, size, name, "output")
        values = rows_of(as_array(input), input_split_sizes or None, size, name, "input")
        return self._each("all_to_all", [(targets, values)], [output], opts)

    alltoall_base = all_to_all_single

    def barrier(self, opts: Any = _DEFAULT) -> Work:
        """Return when every member has called it."""
        return self._each("barrier", [()], [], opts)

    def monitored_barrier(self, timeout: Any = None, wait_all_ranks: bool = False) -> None:
        """Return when every member has called it, or raise with the missing ones after a time."""
        Deferred.run_all()
        limit = self.timeout if timeout is None else seconds_of(timeout)
        distributed.current().monitored_barrier(self.group, limit, wait_all_ranks)

    def _each(
        self, operation: str, calls: Sequence[tuple[Any, ...]], value: Sequence[Any], opts: Any
    ) -> Work:
        """Call one of our operations with each of some arguments, or begin to."""

        def run(communicator: Communicator, options: Options) -> None:
            for arguments in calls:
                getattr(communicator, operation)(*arguments, group=self.group, **options)

        return self._call(run, list(value), opts)

    def _call(self, run: Callable[[Communicator, Options], None], value: Any, opts: Any) -> Work:
        """Run a collective, or begin it."""
        communicator = distributed.current()
        timeout = self.timeout if opts.timeout <= NO_TIME else seconds_of(opts.timeout)
        options: Options = _NO_OPTIONS if timeout is None else {"timeout": timeout}
        if opts.asyncOp:
            return Deferred(lambda: run(communicator, options), value, communicator)
        Deferred.run_all()
        run(communicator, options)
        return DONE

    # -- messages -----------------------------------------------------------------------------------------

    def send(self, tensors: Tensors, dst: int, tag: int) -> Work:
        """Send a tensor, which may be changed when this returns."""
        (tensor,) = tensors
        operation = distributed.current().isend(as_array(tensor), self._member(dst), self.group, tag)
        return DONE if operation.done else self._message(operation, tensors)

    def recv(self, tensors: Tensors, src: int, tag: int) -> Work:
        """Begin to receive a tensor of one member."""
        return self._receive(tensors, self._member(src), tag)

    def recv_anysource(self, tensors: Tensors, tag: int) -> Work:
        """Begin to receive a tensor of any member."""
        return self._receive(tensors, None, tag)

    def _receive(self, tensors: Tensors, sender: int | None, tag: int) -> Work:
        (tensor,) = tensors
        operation = distributed.current().irecv(filled(tensor, "recv"), sender, self.group, tag)
        return self._message(operation, tensors)

    def _member(self, place: int) -> int:
        """Return the rank at a place in the group; torch has not looked at what the user passed."""
        if not 0 <= place < len(self.ranks):
            raise ValueError(
                f"there is no rank {place} in a group of {len(self.ranks)} ranks, 0-{self.size() - 1}"
            )
        return self.ranks[place]

    def _message(self, operation: Operation, value: Any) -> Work:
        return MessageWork(operation, list(value), self.timeout, self.ranks.index)


def _flat(lists: Sequence[Tensors]) -> list[Any]:
    """Return the tensors of all lists: what futures and results hold over gloo too."""
    return [tensor for tensors in lists for tensor in tensors]


def seconds_of(timeout: datetime.timedelta | float) -> float | None:
    """Return a time-out in seconds; None for torch's default and what is longer: that means no limit here."""
    seconds = timeout.total_seconds() if isinstance(timeout, datetime.timedelta) else float(timeout)
    return seconds if seconds < default_pg_timeout.total_seconds() else None


# DistributedDataParallel after a cell that failed, or was interrupted, in its backward pass.
#
# torch's reducer expects that the pass before has ended, and otherwise raises an internal error at each step.
# In a notebook the model is still there, and its user runs the cell again.


class ResumableReducer(Reducer):
    """torch's reducer, which forgets a backward pass that a failure has ended.

    A failure ends the epoch on all ranks, so that all forget alike.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._epoch = distributed.current().epoch

    def prepare_for_forward(self) -> None:
        """Begin a step; in a new epoch as if it were the first."""
        epoch = distributed.current().epoch
        if epoch != self._epoch:
            self._epoch = epoch
            self._reset_state()
            # The failure may have met the exchange in which ranks agree on the order of gradients, when some
            # had changed theirs and others had not.  Buckets of one size are then summed in silence, each
            # with another's gradients.  With parameters to order, this step agrees again.
            self._push_all_rebuilt_params()
        super().prepare_for_forward()
