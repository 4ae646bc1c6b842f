"""A `numpy.memmap` in a task is the file itself; what comes back has the values of that moment."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.multiprocessing.programs import run_program

FILES = """
import functools

def fresh():
    fresh.count += 1
    return np.memmap(f"file{fresh.count}", "f8", "w+", shape=(300, 200))
fresh.count = 0

class Box:
    def __init__(self, content):
        self.content = content

def write(x, k):
    (x.content if isinstance(x, Box) else x["x"] if isinstance(x, dict) else x)[0, k] += k + 1

def write_global(k):
    named[0, k] += k + 1

def forms():
    "Yield an array, and what a task of one argument writes to it with."
    views = (np.asarray, np.asmatrix, lambda x: x[7:], lambda x: x.T, lambda x: x.T[::-2, 5:90:7])
    for view in views:
        x = view(fresh())
        yield x, functools.partial(write, x)
    for wrap in (lambda x: {"x": x}, Box):
        x = fresh()
        yield x, functools.partial(write, wrap(x))
    x = np.lib.format.open_memmap("file.npy", "w+", "f8", (300, 200), fortran_order=True)
    yield x, functools.partial(write, x)
    np.save("other.npy", np.zeros((300, 200)))
    x = np.load("other.npy", mmap_mode="r+")
    yield x, functools.partial(write, x)
    globals()["named"] = x = fresh()
    yield x, write_global
"""


@pytest.mark.parametrize("way", ["pool", "executor", "process", "joblib"])
def test_what_a_task_writes_is_in_the_file(way: str, tmp_path: Path) -> None:
    """As an argument, inside of one, a slice, transposed, a global: in every kind of process."""
    if way == "joblib" and find_spec("joblib") is None:
        pytest.skip("joblib is not installed")
    run_program(
        FILES
        + """
def process(function):
    for k in range(3):
        child = ctx.Process(target=function, args=(k,))
        child.start()
        child.join()

def joblib_(function):
    import joblib
    mp.register_joblib()
    joblib.Parallel(2, backend="nbparallel")(joblib.delayed(function)(k) for k in range(3))

with ctx.Pool(2) as pool, mp.Executor(2, ctx) as executor:
    run = {
        "pool": lambda function: pool.map(function, range(3)),
        "executor": lambda function: list(executor.map(function, range(3))),
        "process": process,
        "joblib": joblib_,
    }[WAY]
    for x, function in forms():
        run(function)
        assert np.asarray(x)[0, :3].tolist() == [1, 2, 3], (type(x), x.shape, x.strides)
""".replace("WAY", repr(way)),
        tmp_path,
        "forkserver",
    )


def test_rights_of_a_mapped_file(tmp_path: Path) -> None:
    """They stay; private pages travel by value; a file without a name is refused where it may be written."""
    run_program(
        """
        def look(x):
            return type(x).__name__, x.flags.writeable, getattr(x, "mode", None), float(x[1])

        def write(x):
            x[0] = 5
            x.flush()
            return x

        np.arange(60_000.0).tofile("file")
        with ctx.Pool(1) as pool:
            read = np.memmap("file", "f8", "r")
            assert pool.apply(look, (read,)) == ("memmap", False, "r", 1.0)
            assert pool.apply(look, (np.asarray(read)[5:],)) == ("ndarray", False, None, 6.0)
            flagged = np.memmap("file", "f8", "r+")
            flagged.flags.writeable = False
            assert pool.apply(look, (flagged,)) == ("memmap", False, "r", 1.0)
            mine = np.memmap("file", "f8", "c")
            mine[1] = -1.0
            assert pool.apply(look, (mine,))[3] == -1.0 and read[1] == 1.0
            both = np.memmap("file", "f8", "r+")
            assert pool.apply(look, (both,)) == ("memmap", True, "r+", 1.0)
            os.rename("file", "renamed")
            result = pool.apply(write, (both,))
            assert both[0] == 5
            result[1] = 6  # what comes back is a copy
            assert both[1] == 1
            both[1] = 6
            np.zeros(60_000).tofile("other")
            os.replace("other", "renamed")
            assert pool.apply(look, (read,))[3] == 6.0, "for reading a copy does"
            try:
                pool.apply(look, ([both],))
            except FileNotFoundError as error:
                assert "renamed, has been deleted" in str(error), error
            else:
                raise AssertionError
        """,
        tmp_path,
        "forkserver",
    )


def test_what_comes_back_is_a_copy(tmp_path: Path) -> None:
    """A file that tasks write again, or that is gone; writing to a result or a batch changes no file."""
    run_program(
        """
        import tempfile

        def scratch(k):
            m = np.memmap("scratch", "f8", "w+", shape=60_000)
            m[:] = k
            return m[:5] if k % 2 else {"all": [np.asarray(m)]}

        def row(k):
            return np.load("data.npy", mmap_mode="r+")[k]

        def temporary(k):
            with tempfile.TemporaryFile() as file, tempfile.TemporaryDirectory() as folder:
                first = np.memmap(file, "f8", "w+", shape=60_000)
                second = np.memmap(folder + "/file", "f8", "w+", shape=60_000)
                first[:], second[:] = k, k + 1
                return first, second

        def put(queue):
            queue.put(row(0))

        class Rows:
            def __init__(self):
                self.rows = np.load("data.npy", mmap_mode="r+")
            def __len__(self):
                return len(self.rows)
            def __getitem__(self, k):
                return self.rows[k]

        np.save("data.npy", np.full((4, 60_000), 8.0))
        with ctx.Pool(1) as pool, mp.Executor(1, ctx) as executor:
            for run in (pool.map, executor.map):
                one, two, three = run(scratch, [1, 2, 3])
                assert (one[0], two["all"][0][0], three[0]) == (1, 2, 3)
                for x in [*run(row, [0, 1]), one, two["all"][0]]:
                    x /= 2
                for k, pair in enumerate(run(temporary, [5, 6]), 5):
                    assert [float(x[-1]) for x in pair] == [k, k + 1]
        queue = ctx.Queue()
        child = ctx.Process(target=put, args=(queue,))
        child.start()
        found = queue.get()
        child.join()
        found /= 2
        batches = 0
        for batch in mp.DataLoader(Rows(), batch_size=None, num_workers=1):
            batch /= 2
            batches += 1
        assert batches == 4 and float(batch[0]) == 4.0
        assert (np.load("data.npy") == 8).all()
        """,
        tmp_path,
        "forkserver",
    )
