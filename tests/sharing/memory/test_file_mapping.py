"""A mapped file keeps no descriptor, and its memory has one owner."""

import gc
import os
import subprocess
import sys
import textwrap
from collections import deque
from pathlib import Path

import pytest

from nbparallel.sharing.memory.mapping import Access
from nbparallel.sharing.strategies import registry
from nbparallel.wire import system

MOST_MAPPINGS = 1 << 17
"""Of so many a process makes itself; Linux allows 65,530 unless told."""

NBYTES = 300_000
PIECES = "file_descriptor", "file_system", "mmap"


def descriptors():
    """Return how many descriptors this process has."""
    return len(os.listdir("/proc/self/fd"))


def mapped(fd):
    """Return how often the file of a descriptor is mapped here."""
    inode = str(os.fstat(fd).st_ino)
    return sum(line.split()[4] == inode for line in Path("/proc/self/maps").read_text().splitlines())


@pytest.fixture(params=PIECES)
def source(request):
    """Make a segment with each strategy, and say which it is."""
    strategy = registry.strategy_of(request.param)
    source = strategy.create(NBYTES)
    yield source
    gc.collect()
    assert mapped(source.fd) == 0
    source.close()


def root_of(mapping):
    """Return an array over a mapping."""
    return mapping.root(deque())


@pytest.mark.parametrize("access", list(Access))
def test_it_keeps_no_descriptor_and_its_rights(source, access):
    """Readers see what writers write and cannot be made writers; what is private stays so."""
    strategy = registry.strategy_of(source.strategy)
    writer = root_of(strategy.map(source, Access.WRITE))
    before = descriptors()
    maps = [strategy.map(source, access) for _ in range(3)]
    assert descriptors() == before
    assert mapped(source.fd) == 4
    roots = [root_of(one) for one in maps]
    assert len({one.address for one in maps}) == 3
    writer[[0, -1]] = 7, 8
    assert all((root[0], root[-1], root.size) == (7, 8, source.nbytes) for root in roots)
    if access is Access.READ:
        assert not roots[0].flags.writeable
        with pytest.raises(ValueError, match="WRITEABLE"):
            roots[0].flags.writeable = True
    else:
        roots[0][0] = 9
        assert (writer[0] == 9) == (access is Access.WRITE)
        assert roots[1][0] == writer[0]


def test_its_memory_is_unmapped_once_with_the_last_array(source):
    """Not before the last view has died, and never a second time, whatever is mapped there by then."""
    strategy = registry.strategy_of(source.strategy)
    mapping = strategy.map(source, Access.WRITE)
    view = root_of(mapping)[1000:][::2]
    view[0] = 5
    mapping.unmap()
    assert mapped(source.fd) == 1
    assert view[0] == 5
    del view
    assert mapped(source.fd) == 0
    other = strategy.map(source, Access.READ)
    mapping.unmap()
    assert mapped(source.fd) == 1
    assert root_of(other)[1000] == 5


def run(script):
    """Run a script in another process; it has to end well and say nothing."""
    code = textwrap.dedent(script)
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", ""), done.stderr


@pytest.mark.slow
def test_a_limit_of_private_memory():
    """It does not count shared memory: what takes the file's place for a moment is not needed."""
    run(
        """
        import resource
        import nbparallel.sharing as nbp
        from pathlib import Path
        small = nbp.ones(300_000, "u1")
        status = Path("/proc/self/status").read_text()
        used = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmData"))
        resource.setrlimit(resource.RLIMIT_DATA, ((used << 10) + (8 << 20), resource.RLIM_INFINITY))
        large = nbp.ones(64 << 20, "u1")
        assert small.all() and large.all()
        """
    )


@pytest.mark.slow
def test_no_mapping_left():
    """Where other code has used up the table of mappings, that is an error that names its limit."""
    if (most := system.mapping_limit() or 0) > MOST_MAPPINGS:
        pytest.skip(f"vm.max_map_count is {most:,} here: a process needs minutes to have so many mappings")
    run(
        """
        import mmap, os
        import numpy as np
        from nbparallel.errors import SharedMemoryFullError
        from nbparallel.sharing.memory.mapping import Access
        from nbparallel.sharing.strategies import registry

        def descriptors():
            return len(os.listdir("/proc/self/fd"))

        strategy = registry.strategy_of("file_descriptor")
        source = strategy.create(300_000)
        strategy.map(source, Access.WRITE)
        before, kept = descriptors(), []
        try:
            while True:  # neighbours with the same rights would be one
                kept.append(mmap.mmap(-1, 4096, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, 1 + len(kept) % 2 * 2))
        except OSError:
            pass
        kept.pop().close()
        last = strategy.map(source, Access.WRITE)
        try:
            strategy.map(source, Access.WRITE)
        except SharedMemoryFullError as error:
            assert "vm.max_map_count" in str(error), error
        else:
            raise AssertionError("there was room")
        del last
        kept.clear()
        last = strategy.map(source, Access.WRITE)
        assert descriptors() == before
        """
    )
