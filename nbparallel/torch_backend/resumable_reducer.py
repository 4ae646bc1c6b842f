"""DistributedDataParallel after a cell that failed, or was interrupted, in its backward pass.

torch's reducer expects that the pass before has ended, and otherwise raises an internal error at every later
step: its programs end with the first failure.  In a notebook the model is still there, and its user runs the
cell again.
"""

from __future__ import annotations

from typing import Any

from torch._C._distributed_c10d import Reducer

from nbparallel import distributed


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
