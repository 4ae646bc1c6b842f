"""Shared tensors that go to processes of torch.multiprocessing stay shared with the ranks."""

import subprocess
import sys

import pytest

from tests.sharing.tensors.optional import needs_torch

pytestmark = [needs_torch, pytest.mark.time_limit(120)]

PROGRAM = """
import sys, warnings
import torch, torch.multiprocessing as mp
from torch.multiprocessing.reductions import reduce_storage
from nbparallel.sharing.tensor_storage import share_tensors
from tests.session.names.pair import Pair

mp.set_sharing_strategy(sys.argv[1])
pair = Pair()
pair.notebook["t"] = t = share_tensors(torch.zeros(10), pair.kernel_store)
pair.run("t[0] = 1")
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    sent = [reduce_storage(t.untyped_storage()) for _ in range(2)]
assert [("as a copy" in str(w.message)) for w in caught] == [True, True], caught
t[1] = 2
rebuild, form = sent[1]
assert rebuild(*form).nbytes() == 40
assert pair.run("t[2] = 3\\nt[:3].tolist()") == [1, 2, 3]
assert t[:3].tolist() == [1, 2, 3]
pair.close()
"""


@pytest.mark.parametrize("strategy", ["file_descriptor", pytest.param("file_system", marks=pytest.mark.slow)])
def test_a_shared_tensor_that_torch_sends_stays_where_it_is(strategy):
    """A queue or a spawned DataLoader gets a copy, with a warning; torch would move the tensor itself.

    In a process of its own: torch starts a manager or a thread, which outlives the test.
    """
    subprocess.run([sys.executable, "-c", PROGRAM, strategy], check=True, timeout=60)
