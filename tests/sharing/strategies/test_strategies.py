"""The contract of a strategy, the registry, and what `file_descriptor` adds."""

import os
import re

import pytest

import nbparallel.sharing as nbp
from nbparallel.errors import InvalidHandleError, StrategyUnavailableError
from nbparallel.sharing.strategies import registry
from nbparallel.sharing.strategies.memfd import FileDescriptorStrategy
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


def test_a_system_without_memfd(monkeypatch):
    """Elsewhere the strategy says so, and so does the registry."""
    monkeypatch.delattr(os, "memfd_create")
    found = nbp.get_all_sharing_strategies()
    assert "memfd_create" in found.missing["file_descriptor"]
    assert re.fullmatch(r"file_system, .*copy\nnot here:\n  file_descriptor: .*", repr(found), re.DOTALL)
    with pytest.raises(StrategyUnavailableError, match="memfd_create"):
        nbp.zeros(3)


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


def test_a_temporary_registry_gives_options_back(tmp_path):
    """What a test sets of a strategy ends with it."""
    before = registry.choice()
    with temporary_registry():
        nbp.set_sharing_strategy("mmap", directory=tmp_path)
        assert registry.choice() != before
    assert registry.choice() == before
