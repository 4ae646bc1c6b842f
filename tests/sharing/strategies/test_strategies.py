"""The contract of a strategy, the registry, and what `file_descriptor` adds."""

import fcntl
import mmap
import os
import re
from collections import deque
from pathlib import Path

import numpy as np
import pytest

import nbparallel.sharing as nbp
from nbparallel.errors import InvalidHandleError, StrategyUnavailableError
from nbparallel.sharing.memory.mapping import Access
from nbparallel.sharing.strategies import registry
from nbparallel.sharing.strategies.file_descriptor import FileDescriptorStrategy
from nbparallel.testing.strategies import temporary_registry


@pytest.fixture(autouse=True)
def registry_as_it_was():
    """Undo what a test does to the registry."""
    with temporary_registry():
        yield


@pytest.fixture
def strategy():
    """Make the strategy under test."""
    return FileDescriptorStrategy()


@pytest.fixture
def source(strategy):
    """Two pages of it."""
    source = strategy.create(5000)
    yield source
    source.close()


def test_names_are_listed():
    """All strategies iterate as names, and what is missing has a reason."""
    found = nbp.get_all_sharing_strategies()
    assert "file_descriptor" in list(found)
    assert "file_descriptor" in found
    assert len(found) == len(list(found))
    assert list(found) == ["file_descriptor", "file_system", "file_region", "mmap", "copy"]
    assert nbp.get_sharing_strategy() == "file_descriptor"


def test_unknown_names_are_errors_that_list_the_names():
    """A typo is a ValueError with the names that work; a name that does not work here says why."""
    with pytest.raises(ValueError, match=r"'file_descriptr'.*available: file_descriptor"):
        nbp.set_sharing_strategy("file_descriptr")
    with pytest.raises(ValueError, match="unknown"):
        nbp.zeros(3, strategy="nothing")
    for nothing in (None, 3, ["mmap"]):
        with pytest.raises(ValueError, match=r"unknown.*available: file_descriptor"):
            nbp.set_sharing_strategy(nothing)
    assert nbp.get_sharing_strategy() == "file_descriptor"


def test_a_strategy_of_ones_own(monkeypatch):
    """A registered strategy is found by name, serves new arrays, and existing ones stay where they are."""

    class Own(FileDescriptorStrategy):
        @property
        def name(self):
            return "own"

    old = nbp.ones(10)
    nbp.register_sharing_strategy("own", Own())
    nbp.set_sharing_strategy("own")
    new = nbp.zeros(10)
    store = nbp.current_store()
    known = {record.segment: record.strategy for record in store.segments()}
    assert known[store.location(new).segment] == "own"
    assert known[store.location(old).segment] == "file_descriptor"
    assert old.sum() == 10
    again = Own()
    nbp.register_sharing_strategy("own", again)  # a notebook's cell that runs again
    assert registry.find_strategy("own") is again
    assert old.sum() + new.sum() == 10
    assert nbp.is_shared(nbp.zeros(10))
    with pytest.raises(ValueError, match=r"own `name` is 'own'.*not 'other'"):
        nbp.register_sharing_strategy("other", Own())
    with pytest.raises(TypeError, match=r"an object, Own\(…\)"):
        nbp.register_sharing_strategy("own", Own)
    with pytest.raises(TypeError, match=r"derives from nbparallel\.sharing\.Strategy"):
        nbp.register_sharing_strategy("thing", object())
    with pytest.raises(ValueError, match="built-in"):
        nbp.register_sharing_strategy("file_descriptor", FileDescriptorStrategy())
    monkeypatch.setattr(Own, "name", "my own")
    with pytest.raises(ValueError, match="identifier"):
        nbp.register_sharing_strategy("my own", Own())
    del new
    store.drain()
    store.trim()


def test_a_strategy_may_define_what_the_contract_once_asked_for():
    """`supports_read_only` and `needs_descriptor` have no meaning any more, and do no harm."""

    class Former(FileDescriptorStrategy):
        name = "former"
        supports_read_only = True

        @property
        def needs_descriptor(self):
            return True

    nbp.register_sharing_strategy("former", Former())
    x = nbp.zeros(10, strategy="former")
    store = nbp.current_store()
    (made,) = [s.strategy for s in store.segments() if s.segment == store.location(x).segment]
    assert made == "former"
    del x
    store.drain()
    store.trim()


def test_a_system_without_memfd(monkeypatch):
    """Elsewhere the strategy says so, and so does the registry."""
    monkeypatch.delattr(os, "memfd_create")
    found = nbp.get_all_sharing_strategies()
    assert "memfd_create" in found.missing["file_descriptor"]
    assert re.fullmatch(r"file_system, .*copy\nnot here:\n  file_descriptor: .*", repr(found), re.DOTALL)
    with pytest.raises(StrategyUnavailableError, match="memfd_create"):
        nbp.zeros(3)


def test_segments_are_zero_reserved_and_sealed(strategy, source):
    """Whole pages, reserved before use, and no process can change the size afterwards."""
    assert source.nbytes == 8192
    assert os.fstat(source.fd).st_blocks * 512 == 8192
    mapping = strategy.map(source, Access.WRITE)
    assert not mapping.root(deque()).any()
    for size in (0, 4096, 1 << 20):
        with pytest.raises(PermissionError):
            os.ftruncate(source.fd, size)
    with pytest.raises(PermissionError):
        fcntl.fcntl(source.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
    assert not os.get_inheritable(source.fd)


def test_the_name_can_be_traced(strategy, source):
    """The leak check finds segments by their name."""
    assert os.readlink(f"/proc/self/fd/{source.fd}").startswith("/memfd:nbp-")
    mapping = strategy.map(source, Access.WRITE)
    assert "/memfd:nbp-" in Path("/proc/self/maps").read_text()
    mapping.unmap()


def test_segments_stay_out_of_core_files(strategy, source):
    """A crash of one rank does not write everybody's arrays into its core file."""
    mapping = strategy.map(source, Access.READ)
    lines = Path("/proc/self/smaps").read_text().split(f"{mapping.address:x}-", 1)[1]
    flags = next(line for line in lines.splitlines() if line.startswith("VmFlags"))
    assert " dd" in flags


@pytest.mark.parametrize("nbytes", [1, 4095, 4096, 4097, 300_000])
def test_content_is_written_whole(strategy, nbytes):
    """What is given at creation is there, followed by zeros up to the end of the page."""
    content = np.random.default_rng(0).integers(0, 255, nbytes, "u1")
    source = strategy.create(nbytes, content.data)
    with mmap.mmap(source.fd, source.nbytes, prot=mmap.PROT_READ) as memory:
        assert memory[:nbytes] == content.tobytes()
        assert not any(memory[nbytes:])
    assert os.fstat(source.fd).st_blocks * 512 == source.nbytes
    source.close()


@pytest.mark.parametrize("lengths", [(4096, 0, 5000, 7), (1, 4095, 4096), (3, 10_000, 64), (0, 0)])
def test_parts_of_a_content_follow_each_other(strategy, lengths):
    """Several buffers are written one behind the other, wherever in a page one ends; zeros follow."""
    parts = tuple(np.full(n, i + 1, np.uint8).data for i, n in enumerate(lengths))
    source = strategy.create(sum(lengths) + 1, parts)
    with mmap.mmap(source.fd, source.nbytes, prot=mmap.PROT_READ) as memory:
        assert memory[: sum(lengths)] == b"".join(parts)
        assert not any(memory[sum(lengths) :])
    assert os.fstat(source.fd).st_blocks * 512 == source.nbytes
    source.close()


def test_only_sealed_memory_of_the_right_size_is_adopted(strategy, source, tmp_path):
    """A descriptor from elsewhere is checked; a refused one is closed."""
    bad = os.memfd_create("nbp-unsealed", os.MFD_ALLOW_SEALING | os.MFD_CLOEXEC)
    os.ftruncate(bad, 8192)
    file = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    os.ftruncate(file, 8192)
    pipe, other = os.pipe()
    os.close(other)
    for fd, nbytes in ((bad, 8192), (file, 8192), (pipe, 8192), (os.dup(source.fd), 4096)):
        with pytest.raises(InvalidHandleError):
            strategy.adopt(fd, nbytes)
        with pytest.raises(OSError, match="Bad file"):
            os.fstat(fd)
    adopted = strategy.adopt(os.dup(source.fd), 8192)
    adopted.close()
    adopted.close()


def test_reading_means_reading(strategy, source):
    """A descriptor opened for reading is adopted, and cannot be mapped for writing."""
    fd = os.open(f"/proc/self/fd/{source.fd}", os.O_RDONLY | os.O_CLOEXEC)
    adopted = strategy.adopt(fd, source.nbytes)
    strategy.map(adopted, Access.READ).unmap()
    with pytest.raises(StrategyUnavailableError, match="Permission denied"):
        strategy.map(adopted, Access.WRITE)
    private = strategy.map(adopted, Access.PRIVATE)
    private.unmap()
    adopted.close()
