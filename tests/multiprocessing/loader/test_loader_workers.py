"""The loader's workers: batches without a copy, the same for any number of them, nothing left behind."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from tests.multiprocessing.programs import run_program

pytestmark = pytest.mark.matrix(cover=(), size=1)

DATASET = """
import random
from nbparallel.multiprocessing import household
from nbparallel.sharing import current_store
from nbparallel.testing.waiting import wait_until

class Data:
    def __init__(self, n=24, bad=None, act=None):
        self.n, self.bad, self.act = n, bad, act

    def __len__(self):
        return self.n

    def __getitem__(self, k):
        if k == self.bad:
            self.act()
        x = np.arange(k * 4e4, (k + 1) * 4e4)
        return {"x": x, "k": k, "name": str(k), "r": (random.random(), np.random.rand())}

def loader(*data, **options):
    options = {"batch_size": 3, "num_workers": 2, "start_method": METHOD, "seed": 7} | options
    return mp.DataLoader(Data(*data), **options)

def plain(batch):
    return (batch["x"].tolist(), batch["k"].tolist(), batch["name"], [r.tolist() for r in batch["r"]])

def nothing_left():
    current_store().drain()
    report = household.report()
    return report is None or not report.processes and not [s for s in report.segments if s.holders != (0,)]

def killed():
    os.kill(os.getpid(), signal.SIGKILL)
"""


def run(body: str, folder: Path, method: str, *, limit: float = 60) -> None:
    """Run `body` with the dataset above; afterwards no process and no message is left."""
    head = f"METHOD = {method!r}\n" + DATASET
    run_program(head + textwrap.dedent(body) + "\nwait_until(nothing_left)\n", folder, method, limit=limit)


def test_workers_change_nothing_but_where_batches_lie(tmp_path: Path, method: str) -> None:
    """Values, order and random numbers are those of 0 workers, in two epochs; arrays are shared."""
    run(
        """
        expected = loader(num_workers=0, shuffle=True)
        expected = [[plain(batch) for batch in expected] for _ in range(2)]
        assert expected[0] != expected[1]
        for workers in (1, 3):
            made = loader(num_workers=workers, shuffle=True)
            for epoch in expected:
                for batch, other in zip(made, epoch, strict=True):
                    assert plain(batch) == other
                    assert nbp.is_shared(batch["x"]) and batch["x"].flags.writeable
                    assert not nbp.is_shared(batch["k"])
            del made, batch
        """,
        tmp_path,
        method,
    )


@pytest.mark.slow
def test_memory_goes_round(tmp_path: Path, method: str) -> None:
    """A batch's memory returns to its worker when it is dropped: an epoch needs few segments."""
    run(
        """
        made = loader(300, num_workers=1)
        seen = []
        for batch in made:
            seen.append(len([s for s in household.report().segments if s.nbytes >= 3 * 320_000]))
        assert len(seen) == 100 and max(seen) < 20, seen
        kept = [batch["x"] for batch in loader(30)]
        assert all((x == np.arange(n * 120_000.0, (n + 1) * 120_000).reshape(3, 40_000)).all()
                   for n, x in enumerate(kept))
        del made, batch, kept
        """,
        tmp_path,
        method,
    )


@pytest.mark.slow
def test_an_early_break_leaves_nothing(tmp_path: Path, method: str) -> None:
    """No message is under way afterwards, and the same workers do the next epoch, which is whole."""
    run(
        """
        made = loader(persistent_workers=True)
        pids = set()
        for _ in range(3):
            for batch in made:
                break
            del batch
            current_store().drain()
            wait_until(lambda: not any(s.messages for s in household.report().segments))
            assert sorted(k for batch in made for k in batch["k"].tolist()) == list(range(24))
            pids |= {guest.pid for guest in household.report().processes}
        assert 1 <= len(pids) <= 2, pids
        made.close()
        wait_until(nothing_left)
        assert len(list(made)) == 8
        once = loader(persistent_workers=False)
        assert len(list(once)) == 8
        del made
        wait_until(nothing_left)
        """,
        tmp_path,
        method,
    )


@pytest.mark.slow
def test_two_iterations_of_one_loader(tmp_path: Path, method: str) -> None:
    """Each is an epoch of its own with its own workers; one may be left in the middle."""
    run(
        """
        made = loader()
        first, second = iter(made), iter(made)
        pairs = [(a["k"].tolist(), b["k"].tolist()) for a, b in zip(first, second)]
        assert pairs == [(k, k) for k in ([n, n + 1, n + 2] for n in range(0, 24, 3))]
        assert next(iter(made))["k"].tolist() == [0, 1, 2]
        del made, first, second
        """,
        tmp_path,
        method,
    )


@pytest.mark.slow
def test_a_dead_worker_is_named(tmp_path: Path, method: str) -> None:
    """With its batch and samples; the next epoch has new workers; killed between two it costs nothing."""
    run(
        """
        made, batch = loader(24, 10, killed), None
        for _ in range(2):
            seen, began = [], time.monotonic()
            try:
                for batch in made:
                    seen += batch["k"].tolist()
            except WorkerDiedError as error:
                assert "batch 3 (samples 9, 10, 11)" in str(error), error
                assert error.signal_name == "SIGKILL" and str(error.pid) in str(error)
            else:
                raise AssertionError
            assert time.monotonic() - began < 10 and seen == list(range(len(seen))) and len(seen) <= 9
        made = loader()
        assert len(list(made)) == 8
        killed_ones = {guest.pid for guest in household.report().processes}
        for pid in killed_ones:
            os.kill(pid, signal.SIGKILL)
        wait_until(lambda: not killed_ones & {guest.pid for guest in household.report().processes})
        assert len(list(made)) == 8
        del made, batch
        """,
        tmp_path,
        method,
    )


@pytest.mark.slow
def test_exceptions_keep_their_class(tmp_path: Path, method: str) -> None:
    """The remote traceback is the cause, a note names the batch; the iteration can go on."""
    run(
        """
        class Own(Exception):
            pass
        def fail():
            raise Own("ten")
        made = loader(24, 10, fail)
        iteration, seen = iter(made), []
        while True:
            try:
                batch = next(iteration)
            except StopIteration:
                break
            except Own as error:
                assert "in fail" in str(error.__cause__) and "batch 3" in error.__notes__[0]
                seen.append(error.args)
            else:
                seen.append(int(batch["k"][0]))
        assert seen == [0, 3, 6, ("ten",), 12, 15, 18, 21]
        del made, iteration, batch
        class Awkward(Exception):
            def __init__(self, a, b):
                super().__init__(f"{a} and {b}")
        def awkward():
            raise Awkward(1, 2)
        try:
            list(loader(24, 10, awkward))
        except Awkward as error:
            assert str(error) == "1 and 2" and "in awkward" in str(error.__cause__)
        else:
            raise AssertionError
        def refuse(number):
            raise Own(number)
        try:
            list(loader(worker_init_fn=refuse))
        except Own as error:
            assert error.args in ((0,), (1,))
        else:
            raise AssertionError
        """,
        tmp_path,
        method,
    )


@pytest.mark.slow
def test_streams_are_read_once(tmp_path: Path, method: str) -> None:
    """By one worker, with the batches of 0 workers, however the dataset or `worker_init_fn` splits it."""
    run(
        """
        class Stream:
            first, step, fails = 0, 1, -1
            def __init__(self, splits=False):
                self.splits = splits
            def __iter__(self):
                numbers, info = range(self.first, 23, self.step), mp.get_worker_info()
                if self.splits and info is not None:
                    assert (info.id, info.num_workers, info.dataset) == (0, 1, self)
                    numbers = numbers[info.id::info.num_workers]
                for n in numbers:
                    yield n, np.random.rand()
        def epochs(splits, workers, worker_init_fn=None):
            made = mp.DataLoader(Stream(splits), 2, num_workers=workers, seed=1, start_method=METHOD,
                                 worker_init_fn=worker_init_fn)
            return [[(n.tolist(), r.tolist()) for n, r in made] for _ in range(2)]
        def split(number):
            info = mp.get_worker_info()
            info.dataset.first, info.dataset.step = info.id, info.num_workers
        expected = epochs(False, 0)
        assert epochs(False, 3) == epochs(True, 3) == epochs(False, 2, split) == expected
        assert expected[0] != expected[1]
        class Failing:
            def __iter__(self):
                return self
            at = 0
            def __next__(self):
                self.at += 1
                if self.at == 1:
                    raise OSError("bad record")
                if self.at > 4:
                    raise StopIteration
                return self.at
        batches = iter(mp.DataLoader(Failing(), None, num_workers=2, start_method=METHOD))
        try:
            next(batches)
        except OSError as error:
            assert "bad record" in str(error)
        else:
            raise AssertionError
        assert list(batches) == [2, 3, 4]
        del batches
        """,
        tmp_path,
        method,
    )


@pytest.mark.slow
def test_time_out_and_order(tmp_path: Path, method: str) -> None:
    """A time-out names what the workers do; without order a slow batch does not hold up the others."""
    run(
        """
        try:
            list(loader(24, 4, lambda: time.sleep(60), timeout=1))
        except mp.TimeoutError as error:
            assert "batch 1 (samples 3, 4, 5)" in str(error)
        else:
            raise AssertionError
        made = loader(24, 4, lambda: time.sleep(1), in_order=False)
        order = [int(batch["k"][0]) for batch in made]
        assert sorted(order) == list(range(0, 24, 3)) and order != sorted(order)
        del made
        """,
        tmp_path,
        method,
    )


@pytest.mark.slow
def test_large_datasets_are_not_multiplied(tmp_path: Path) -> None:
    """All workers map one copy of a private array; what one writes the others do not see."""
    run(
        """
        class Big:
            x = None
            def __len__(self):
                return 8
            def __getitem__(self, k):
                self.x[0] += 1
                return mp.get_worker_info().id, self.x[0]
        big = Big()
        big.x = np.ones(5_000_000)
        made = mp.DataLoader(big, num_workers=4, start_method=METHOD, persistent_workers=True)
        found = [[] for _ in range(4)]
        for worker, value in made:
            found[int(worker[0])].append(value[0])
        assert all(values == [2.0 + n for n in range(len(values))] for values in found), found
        large = [s.nbytes for s in household.report().segments if s.nbytes > 30_000_000]
        assert len(large) == 1 and big.x[0] == 1
        del made
        """,
        tmp_path,
        "forkserver",
    )


@pytest.mark.slow
def test_locks_travel_with_a_dataset(tmp_path: Path, method: str) -> None:
    """A counter that all workers share is inherited as they start."""
    run(
        """
        class Counted(Data):
            def __getitem__(self, k):
                with self.count.get_lock():
                    self.count.value += 1
                return k
        data = Counted()
        data.count = ctx.Value("i", 0)
        made = mp.DataLoader(data, 2, num_workers=2, start_method=METHOD)
        assert sorted(k for batch in made for k in batch.tolist()) == list(range(24))
        assert data.count.value == 24
        del made
        """,
        tmp_path,
        method,
    )
