"""`from_file`: a file that the user keeps, as a shared array."""

import errno
import os

import numpy as np
import pytest

import nbparallel as nbp
from nbparallel.errors import (
    ObjectArrayError,
    ReadOnlyArrayError,
    SharedMemoryFullError,
    StrategyUnavailableError,
)
from nbparallel.sharing import arrays, current_store
from nbparallel.sharing.strategies import named_files, registry
from nbparallel.sharing.strategies.named_files import MemoryMapStrategy
from nbparallel.testing.strategies import temporary_registry


@pytest.fixture(scope="module")
def ranks():
    """Start one rank for all tests."""
    with nbp.Session(1) as session:
        session.run("pass", namespace={})
        yield session


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("dtype", ["f8", ">i2", "U3", [("a", "i4"), ("b", "f8", 2)]])
def test_what_numpy_saved_is_there(tmp_path, dtype, order):
    """Dtype, shape, order and values are those of the file, and nothing is copied."""
    x = np.zeros((3, 4), dtype, order)
    x.ravel("K").view("u1")[:] = np.arange(x.nbytes) % 7 if x.dtype.kind != "U" else 0
    np.save(tmp_path / "x.npy", x)
    y = nbp.from_file(tmp_path / "x.npy")
    assert type(y) is np.ndarray
    assert (y.dtype, y.shape, y.strides) == (x.dtype, x.shape, x.strides)
    assert y.tobytes() == x.tobytes()
    assert nbp.is_shared(y)
    assert not y.flags.writeable
    with pytest.raises(ReadOnlyArrayError):
        nbp.share(y)


def test_writing_is_saving(tmp_path):
    """What is written through mode w+ or r+ is in the file, which stays when the array goes."""
    path = tmp_path / "x.npy"
    x = nbp.from_file(path, "i8", (2, 3), mode="w+")
    assert not x.any()
    x[1, 2] = 5
    y = nbp.from_file(path, mode="r+")
    y[0, 0] = 6
    assert x[0, 0] == 6
    del x, y
    current_store().drain()
    assert np.load(path).tolist() == [[6, 0, 0], [0, 0, 5]]
    assert os.listdir(tmp_path) == ["x.npy"]


def test_making_a_file_anew_leaves_the_old_array_alone(tmp_path):
    """Running the same cell again replaces the file; who still sees the old one is not killed."""
    path = tmp_path / "x.npy"
    old = nbp.from_file(path, float, 100_000, mode="w+")
    old[:] = 1
    new = nbp.from_file(path, float, 10, mode="w+")
    assert old.sum() == 100_000
    assert new.sum() == 0
    assert np.load(path).shape == (10,)


def test_raw_values(tmp_path):
    """A file without a header needs a dtype; the shape is found from its size."""
    path = tmp_path / "raw"
    np.arange(10, dtype="i2").tofile(path)
    assert nbp.from_file(path, "i2").tolist() == list(range(10))
    assert nbp.from_file(path, "i2", (2, 5)).tolist() == np.arange(10).reshape(2, 5).tolist()
    with pytest.raises(ValueError, match="need dtype="):
        nbp.from_file(path)
    with pytest.raises(ValueError, match="has 20 bytes"):
        nbp.from_file(path, "i2", (3, 5))


def test_what_cannot_be_shared_is_refused(tmp_path, monkeypatch):
    """Objects, other shapes, cut-off files, full disks, network file systems: each in a sentence."""
    np.save(tmp_path / "o.npy", np.array([None]), allow_pickle=True)
    np.save(tmp_path / "x.npy", np.arange(10))
    np.save(tmp_path / "cut.npy", np.arange(10))
    os.truncate(tmp_path / "cut.npy", 150)
    for name, arguments, error, words in (
        ("o.npy", {}, ObjectArrayError, None),
        ("x.npy", {"dtype": "f4"}, ValueError, "not float32"),
        ("cut.npy", {}, ValueError, "has 150 bytes"),
        ("x.npy", {"mode": "a"}, ValueError, "mode"),
        ("new.npy", {"mode": "w+"}, TypeError, "needs dtype= and shape="),
        ("none.npy", {}, FileNotFoundError, None),
        ("big.npy", {"dtype": "u1", "shape": 1 << 60, "mode": "w+"}, SharedMemoryFullError, None),
    ):
        with pytest.raises(error, match=words):
            nbp.from_file(tmp_path / name, **arguments)
    monkeypatch.setattr(named_files, "file_system_of", lambda path: "nfs4")
    with pytest.raises(StrategyUnavailableError, match="network file system"):
        nbp.from_file(tmp_path / "x.npy")
    monkeypatch.setattr(named_files, "file_system_of", lambda path: "fuse.drive")  # Colab's Google Drive
    with pytest.raises(StrategyUnavailableError, match="network file system"):
        nbp.set_sharing_strategy("mmap", directory=tmp_path)
    assert sorted(os.listdir(tmp_path)) == ["cut.npy", "o.npy", "x.npy"]


def test_errors_speak_of_the_users_file(tmp_path, monkeypatch):
    """A folder that is not there, damaged and odd files, a disk without names: never of our own names."""

    def refused(*arguments, **options):
        with pytest.raises((OSError, ValueError, SharedMemoryFullError)) as caught:
            nbp.from_file(*arguments, **options)
        assert "nbp_" not in str(caught.value)
        return caught.value

    new = {"dtype": "f8", "shape": 3, "mode": "w+"}
    missing = refused(tmp_path / "no" / "x.npy", **new)
    assert isinstance(missing, FileNotFoundError)
    assert missing.filename == str(tmp_path / "no")
    folder = refused(tmp_path, **new)
    assert isinstance(folder, IsADirectoryError)
    assert folder.filename == str(tmp_path)
    full = str(refused(tmp_path / "x.npy", "u1", 1 << 60, mode="w+"))
    assert f"on {tmp_path}" in full
    assert "delete files there" in full
    assert "another disk" in full
    assert "set_sharing_strategy" not in full

    def no_room(fd, size, content):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), os.readlink(f"/proc/self/fd/{fd}"))

    with monkeypatch.context() as patched:
        patched.setattr(arrays, "fill", no_room)  # of the draft
        assert isinstance(refused(tmp_path / "x.npy", **new), SharedMemoryFullError)
    for content, words in {
        b"\x93NUMPY\1": "damaged",
        b"\x93NUMPY\1\0\x3c\0{'descr': '<f8', 'fortran_order': False, 'shape': (-3,)}".ljust(80): "damaged",
        b"\x93NUMPY\3\0": "version 3",
        b"12345": "no whole number of float64",
        b"": "is empty",
    }.items():
        (tmp_path / "odd").write_bytes(content)
        text = str(refused(tmp_path / "odd", "f8"))
        assert text.startswith(str(tmp_path / "odd"))
        assert words in text
    empty = nbp.from_file(tmp_path / "none", "f8", 0, mode="w+")
    assert nbp.from_file(tmp_path / "none", "f8").shape == empty.shape == (0,)
    assert sorted(os.listdir(tmp_path)) == ["none", "odd"]


def test_a_network_file_system_may_be_insisted_on(tmp_path, monkeypatch):
    """`allow_network=True` opens the file all the same; the ranks are told about the directory as well."""
    strategy = MemoryMapStrategy()
    monkeypatch.setattr(named_files, "file_system_of", lambda path: "nfs4")
    np.save(tmp_path / "x.npy", np.arange(10))
    assert nbp.from_file(tmp_path / "x.npy", allow_network=True).sum() == 45
    assert nbp.from_file(tmp_path / "y.npy", int, 3, "w+", allow_network=True).sum() == 0
    assert strategy.unavailable_reason is not None
    with temporary_registry(strategy):
        nbp.set_sharing_strategy("mmap", directory=tmp_path, allow_network=True)
        assert strategy.unavailable_reason is None
        assert registry.choice().options["mmap"] == {"directory": str(tmp_path), "allow_network": True}
        assert nbp.ones(100_000).sum() == 100_000
        with pytest.raises(TypeError, match="no option"):
            nbp.set_sharing_strategy("mmap", allow_nfs=True)


@pytest.mark.slow
@pytest.mark.parametrize("nbytes", [2**31 - 1, 2**31, 2**31 + 1, 2**32 - 1, 2**32, 2**32 + 1, 100 << 30])
def test_f50_sizes_that_do_not_fit_a_word(tmp_path, ranks, nbytes):
    """Files with holes, around 2**31 and 2**32 and larger than memory, open at once, here and on a rank."""
    path = tmp_path / "raw"
    with path.open("wb") as file:
        file.truncate(nbytes)
        file.seek(nbytes - 1)
        file.write(b"\7")
    names = {"x": nbp.from_file(path, "u1", mode="r+"), "nbp": nbp}
    names["tail"] = names["x"][-1:]
    assert names["x"].shape == (nbytes,)
    cell = "x[0] = 5\nx.nbytes, int(x[-1]), int(tail[0]), tail.nbytes"
    assert ranks.run(cell, namespace=names).values == [(nbytes, 7, 7, 1)]
    assert names["x"][0] == 5
    assert os.stat(path).st_blocks * 512 < 1 << 20, "nothing was filled"
    names.clear()
    ranks.run("pass", namespace=names)


@pytest.mark.parametrize("strategy", ["file_descriptor", "file_system", "file_region", "mmap"])
def test_numpy_saves_a_shared_array(tmp_path, strategy):
    """`numpy.save` and `numpy.load` take shared arrays as any others, whatever their layout."""
    x = nbp.share(np.arange(60.0).reshape(3, 4, 5)[::-1, ::2].T, strategy=strategy)
    np.save(tmp_path / "x.npy", x)
    np.savez(tmp_path / "xs.npz", a=x, b=x[0])
    assert np.array_equal(np.load(tmp_path / "x.npy"), x)
    assert np.array_equal(nbp.from_file(tmp_path / "x.npy"), x)
    with np.load(tmp_path / "xs.npz") as saved:
        assert np.array_equal(saved["b"], x[0])
    out = nbp.from_file(tmp_path / "y.npy", x.dtype, x.shape, "w+")
    out[:] = x
    assert np.array_equal(np.load(tmp_path / "y.npy"), x)


@pytest.mark.slow
def test_ranks_see_the_same_file(tmp_path):
    """A file opened for reading is read-only on ranks; one opened for writing is written by all of them."""
    path = tmp_path / "x.npy"
    np.save(path, np.arange(4.0))
    names = {"x": nbp.from_file(path), "y": nbp.from_file(tmp_path / "y.npy", float, 2, mode="w+")}
    with nbp.Session(2) as session:
        result = session.run("y[rank] = x.sum() + rank\nx.flags.writeable", namespace=names)
        assert result.values == [False, False]
    assert names["y"].tolist() == [6.0, 7.0]
