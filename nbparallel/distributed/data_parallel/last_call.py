"""The last call of `average_gradients`: a training loop repeats it, often with the same arrays."""

from __future__ import annotations

import operator
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from nbparallel.distributed.data_parallel.buckets import BucketPlan
from nbparallel.distributed.runtime.shared_arrays import AnyArray


@dataclass(slots=True)
class LastCall:
    """What is remembered of a rank's last call: a training loop repeats it, often with the same arrays."""

    plan: BucketPlan | None = None
    shared: Sequence[weakref.ref[AnyArray]] = ()
    """Its arrays, if all were shared; no two of them overlapped."""
    foreign: bool = False
    """Whether another rank could pass memory of one of those as well."""

    def is_repeated_by(self, arrays: list[Any], bucket_nbytes: Any, members: int) -> BucketPlan | None:
        """Return the plan if arrays are like those of the last call and no other rank could pass one."""
        plan = self.plan
        if plan is None or not plan.buckets or not plan.fits(None, arrays, bucket_nbytes, members):
            return None
        return plan if len(arrays) == 1 or (not self.foreign and self.are_apart(arrays)) else None

    def are_apart(self, arrays: list[AnyArray]) -> bool:
        """Whether no two can share memory: they are those of the last call, or each owns its memory."""
        if len(arrays) == len(self.shared):
            return all(map(operator.is_, map(operator.call, self.shared), arrays))
        for x in arrays:
            if x.base is not None:
                return False
        return len(set(map(id, arrays))) == len(arrays)
