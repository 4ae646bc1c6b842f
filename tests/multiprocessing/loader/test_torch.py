"""torch's loader with our processes, torch's datasets in our loader; torch is never imported by us."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.multiprocessing.programs import run_program

pytest.importorskip("torch")
pytestmark = [pytest.mark.slow, pytest.mark.matrix(cover=(), size=1)]  # each start method by turns

HEAD = """
import torch
from torch.utils import data
torch.set_num_threads(1)
"""


def test_torchs_loader_takes_our_processes(tmp_path: Path, method: str) -> None:
    """Classes of a script, arrays and tensors without a copy; nothing on stderr when the program ends."""
    run_program(
        HEAD
        + """
class Images(data.Dataset):
    def __len__(self):
        return 12
    def __getitem__(self, k):
        return torch.full((60_000,), float(k)), np.full(60_000, k), k

loader = data.DataLoader(Images(), batch_size=3, num_workers=2, persistent_workers=True,
                         multiprocessing_context=ctx, collate_fn=mp.default_collate)
for _ in range(2):
    seen = []
    for x, y, k in loader:
        assert nbp.is_shared(x) and nbp.is_shared(y)
        assert x[:, 0].tolist() == y[:, 0].tolist() == k.tolist()
        seen += k.tolist()
    assert seen == list(range(12))
""",
        tmp_path,
        method,
    )


def test_our_loader_takes_torchs_datasets(tmp_path: Path, method: str) -> None:
    """Tensors arrive shared, streams split by torch's `get_worker_info`, torch's numbers are seeded."""
    run_program(
        HEAD
        + """
class Stream(data.IterableDataset):
    def __iter__(self):
        info = data.get_worker_info()
        numbers = range(10) if info is None else range(info.id, 10, info.num_workers)
        for k in numbers:
            yield torch.full((70_000,), float(k)), k

class Noise(data.Dataset):
    def __len__(self):
        return 6
    def __getitem__(self, k):
        return torch.rand(3)

found = []
for x, k in mp.DataLoader(Stream(), 2, num_workers=2, start_method=ctx.get_start_method()):
    assert nbp.is_shared(x) and x[:, 0].tolist() == k.tolist()
    x += 1
    found += k.tolist()
assert sorted(found) == list(range(10))
state = torch.get_rng_state()
here = [x.tolist() for x in mp.DataLoader(Noise(), 2, seed=3)]
assert torch.equal(torch.get_rng_state(), state)
there = mp.DataLoader(Noise(), 2, seed=3, num_workers=2, start_method=ctx.get_start_method())
assert [x.tolist() for x in there] == here
parts = data.Subset(Noise(), [1, 2, 3])
assert len(list(mp.DataLoader(parts, 2, sampler=data.RandomSampler(parts)))) == 2
""",
        tmp_path,
        method,
    )


def test_torchs_own_way_to_split_a_stream(tmp_path: Path, method: str) -> None:
    """Its documentation's `worker_init_fn` gets a `get_worker_info`, and no sample is lost."""
    run_program(
        HEAD
        + """
class Numbers(data.IterableDataset):
    def __init__(self, start, end):
        self.start, self.end = start, end
    def __iter__(self):
        return iter(range(self.start, self.end))

def worker_init_fn(worker_id):
    info = torch.utils.data.get_worker_info()
    start, end = info.dataset.start, info.dataset.end
    each = -(-(end - start) // info.num_workers)
    info.dataset.start = start + info.id * each
    info.dataset.end = min(info.dataset.start + each, end)

made = mp.DataLoader(Numbers(3, 17), num_workers=2, worker_init_fn=worker_init_fn,
                     start_method=ctx.get_start_method())
for _ in range(2):
    assert sorted(batch.item() for batch in made) == list(range(3, 17))
""",
        tmp_path,
        method,
    )


def test_torch_that_a_worker_loads_itself(tmp_path: Path) -> None:
    """Whoever imports it in a fresh worker finds the worker's information there."""
    run_program(
        """
def worker_init_fn(worker_id):
    import torch.utils.data
    assert torch.utils.data.get_worker_info().id == worker_id

made = mp.DataLoader([1, 2], num_workers=1, worker_init_fn=worker_init_fn, start_method="spawn")
assert len(list(made)) == 2
""",
        tmp_path,
    )


def test_torch_is_never_imported(tmp_path: Path) -> None:
    """Not by a loader, nor in its workers."""
    run_program(
        """
def look(samples):
    return "torch" in sys.modules
assert list(mp.DataLoader([1, 2], num_workers=1, collate_fn=look)) == [False, False]
assert "torch" not in sys.modules
""",
        tmp_path,
    )
