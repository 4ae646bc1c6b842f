"""A tensor in the memory of a GPU: a cell that names it gets a copy on the same device."""

import io
import pickle
import subprocess
import sys

import pytest

from nbparallel.transfer.tensor_pickling import find_reducers
from tests.sharing.tensors.optional import needs_torch, torch

PROGRAM = """
import torch
import nbparallel as nbp

x = torch.arange(6.0, device="cuda")
both = {"x": x, "tail": x[4:]}
model = torch.nn.Linear(4, 1).cuda()
with nbp.Session(2) as session:
    result = session.run('''
x, tail = both["x"], both["tail"]
tail += rank
views = x.tolist()
assert model(torch.ones(1, 4, device="cuda")).is_cuda
{"views": views, "device": str(tail.device), "twice": x * 2}
''', namespace={"both": both, "model": model, "torch": torch})
    for rank, value in sorted(result.values.items()):
        assert value["device"] == "cuda:0", value
        assert value["views"] == [0, 1, 2, 3, 4 + rank, 5 + rank], value
        assert value["twice"].is_cuda and value["twice"].tolist() == [2 * n for n in value["views"]]
assert x.tolist() == [0, 1, 2, 3, 4, 5], "each rank has a copy"
print("done")
"""


class _OtherStorage:
    """Stands for a storage of a GPU, which few machines with these tests have."""

    def __init__(self, storage):
        self.device = torch.device("cuda", 0)
        self.cpu = storage.clone


@needs_torch
def test_a_storage_of_a_device_goes_by_its_bytes():
    """Torch's own way writes what torch cannot load."""
    storage = torch.arange(3.0).untyped_storage()
    with pytest.raises(AttributeError, match="no attribute 'dtype'"):  # when this passes, ours can go
        pickle.load(io.BytesIO(pickle.dumps(storage)))
    rebuild, (device, content) = find_reducers().by_class[torch.UntypedStorage](None, _OtherStorage(storage))
    assert device == "cuda:0"
    copy = rebuild("cpu", content)
    assert bytes(copy) == bytes(storage)
    assert copy.data_ptr() not in (storage.data_ptr(), content.data_ptr())


@needs_torch
@pytest.mark.slow
def test_tensors_of_a_gpu_in_a_cell():
    """Views stay views of one copy, a module computes there, and results come back to the device."""
    if not torch.cuda.is_available():
        pytest.skip("this machine has no GPU")
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "done\n"
