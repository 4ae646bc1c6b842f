"""Written pages: a write is seen, whatever the memory, and nothing else is."""

import ctypes
import mmap
import os
import tempfile
import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nbparallel.distributed.races.recording.write_protection import WriteProtection
from nbparallel.distributed.races.recording.written_pages import PageWatch
from nbparallel.sharing import Store

PAGE = mmap.PAGESIZE
HUGE = 2 << 20
KINDS = ["memfd", "dev_shm", "disk", "private", "anonymous"]
NO_RIGHTS, COLLAPSE, PAGEOUT = 0, 25, 21
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def map_pages(kind, folder, count, *, populated=False):
    """Return new memory of a kind as an array."""
    nbytes = count * PAGE
    if kind == "anonymous":
        memory = mmap.mmap(-1, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    else:
        fd = descriptor_of(kind, folder)
        os.posix_fallocate(fd, 0, nbytes)
        memory = mmap.mmap(fd, nbytes, mmap.MAP_PRIVATE if kind == "private" else mmap.MAP_SHARED)
        os.close(fd)
    array = np.frombuffer(memory, np.uint8)
    if populated:
        array[::PAGE] = 1
    return array


def descriptor_of(kind, folder):
    """Return the descriptor of an empty file without a name."""
    if kind in ("memfd", "private"):
        return os.memfd_create("m")
    fd, name = tempfile.mkstemp(dir="/dev/shm" if kind == "dev_shm" else folder)
    os.unlink(name)
    return fd


def area(array):
    """Return the memory of an array."""
    return array.ctypes.data, array.nbytes


def page_numbers(watch, array):
    """Return the numbers of an array's pages that were written, checking that there are no others."""
    pages = [
        number
        for address, nbytes in watch.written()
        for number in range(
            (address - array.ctypes.data) // PAGE, (address + nbytes - array.ctypes.data) // PAGE
        )
    ]
    assert pages == sorted(set(pages))
    return pages


def field_at(address, name):
    """Return a field of the mapping that holds an address (proc_pid_smaps(5))."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first = line.split()[0]
        if "-" in first and not first.endswith(":"):
            begin, end = (int(word, 16) for word in first.split("-"))
            inside = begin <= address < end
        elif inside and first == name:
            return line.split()[1:]
    return []


def is_registered(address):
    """Return whether the mapping at an address is write-protected for a userfaultfd."""
    return "uw" in field_at(address, "VmFlags:")


@pytest.mark.parametrize("populated", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_written_pages_are_seen_in_every_kind_of_memory(kind, populated, tmp_path):
    """Written ones, touched before or not, and not those that are read."""
    array = map_pages(kind, tmp_path, 64, populated=populated)
    with PageWatch([area(array)]) as watch:
        assert (watch.refused, watch.written()) == ("", [])
        assert array[3 * PAGE :: PAGE].sum() == (61 if populated else 0)
        assert watch.written() == []
        array[5 * PAGE] = 7
        array[9 * PAGE - 1 : 12 * PAGE + 1] = 8
        assert page_numbers(watch, array) == [5, 8, 9, 10, 11, 12]
        array[63 * PAGE] = 9
        assert page_numbers(watch, array) == [5, 8, 9, 10, 11, 12, 63]
    assert watch.written() == []
    array[0] = 1


@pytest.mark.parametrize("strategy", ["file_descriptor", "file_system", "file_region", "mmap"])
def test_shared_arrays_of_every_strategy_are_watched(strategy):
    """Small ones, which lie in a region, and large ones."""
    store = Store()
    for size in (100, 3_000_000):
        array = store.zeros(size, "f8", strategy=strategy)
        with PageWatch([area(array)]) as watch:
            array[size // 2] = 1.0
            assert watch.refused == ""
            written = watch.written()
        address = array[size // 2 :].ctypes.data
        assert written == [(address // PAGE * PAGE, PAGE)]
        del array
    store.close()


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 40 * PAGE - 1), st.integers(1, 3 * PAGE)), max_size=8))
def test_written_pages_are_those_of_the_bytes(writes):
    """Any stretches of bytes: their pages and no others."""
    array = map_pages("memfd", None, 40)
    expected = set()
    with PageWatch([area(array)]) as watch:
        for start, nbytes in writes:
            array[start : start + nbytes] = 1
            expected |= set(range(start // PAGE, -(-min(start + nbytes, array.size) // PAGE)))
        assert page_numbers(watch, array) == sorted(expected)


def test_ranges_are_rounded_to_pages_in_any_order(tmp_path):
    """Empty ones are none, and one page is watched and reported once."""
    array = map_pages("memfd", tmp_path, 16)
    base = array.ctypes.data
    ranges = [(base + 4 * PAGE, 1), (base + PAGE + 200, 9), (base + 9 * PAGE + 5, 0), (base + 100, PAGE)]
    with PageWatch(ranges) as watch:
        array[:] = 1
        assert (watch.refused, watch.written()) == ("", [(base, 2 * PAGE), (base + 4 * PAGE, PAGE)])
    with PageWatch([]) as watch:
        assert (watch.refused, watch.written()) == ("", [])


def test_more_stretches_than_one_call_returns(tmp_path):
    """Every second page of many."""
    array = map_pages("memfd", tmp_path, 10_000)
    with PageWatch([area(array)]) as watch:
        array[:: 2 * PAGE] = 1
        assert page_numbers(watch, array) == list(range(0, 10_000, 2))


def test_a_watch_begins_clean(tmp_path):
    """What was written before it, or during an earlier one, does not count."""
    array = map_pages("memfd", tmp_path, 16, populated=True)
    for number in range(3):
        with PageWatch([area(array)]) as watch:
            array[number * PAGE] = 1
            assert page_numbers(watch, array) == [number]


def test_reading_does_not_count_and_read_only_memory_is_no_refusal(tmp_path):
    """Neither memory that may become writable nor memory that never can; its neighbours are watched."""
    fd = os.memfd_create("m")
    os.posix_fallocate(fd, 0, 24 * PAGE)
    reading = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY)
    base = reserve(24)
    place(base, 8, fd, mmap.PROT_READ | mmap.PROT_WRITE)
    place(base + 8 * PAGE, 8, reading, mmap.PROT_READ)
    place(base + 16 * PAGE, 8, fd, mmap.PROT_READ)
    os.close(fd)
    os.close(reading)
    with PageWatch([(base, 24 * PAGE)]) as watch:
        assert ctypes.string_at(base, 24 * PAGE) == bytes(24 * PAGE)
        assert (watch.refused, watch.written()) == ("", [])
        ctypes.memset(base + 3 * PAGE, 1, 1)
        assert watch.written() == [(base + 3 * PAGE, PAGE)]
    assert not any(is_registered(base + at * PAGE) for at in (0, 8, 16))
    _libc.munmap(base, 24 * PAGE)


def reserve(count):
    """Return the address of pages that can be mapped in any way."""
    return _libc.mmap(None, count * PAGE, NO_RIGHTS, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)


def place(address, count, fd, rights):
    """Map the beginning of a file, or nothing in particular, at an address."""
    flags = 0x10 | (mmap.MAP_SHARED if fd >= 0 else mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    assert _libc.mmap(address, count * PAGE, rights, flags, fd, 0) == address


def test_what_the_system_and_other_threads_write_counts(tmp_path):
    """A read(2) into the memory, and a thread of ours."""
    array = map_pages("memfd", tmp_path, 16)
    (tmp_path / "file").write_bytes(b"x" * 100)
    with PageWatch([area(array)]) as watch, open(tmp_path / "file", "rb", buffering=0) as file:
        assert file.readinto(memoryview(array)[2 * PAGE :]) == 100
        thread = threading.Thread(target=array.__setitem__, args=(9 * PAGE, 1))
        thread.start()
        thread.join()
        assert page_numbers(watch, array) == [2, 9]


@pytest.mark.parametrize("advice", [mmap.MADV_DONTNEED, PAGEOUT, COLLAPSE])
@pytest.mark.parametrize("kind", ["memfd", "disk"])
def test_pages_that_leave_the_page_table_stay_written(kind, advice, tmp_path):
    """And those that were not written stay so: dropped, paged out, or to be collapsed into huge ones."""
    array = map_pages(kind, tmp_path, 64, populated=True)
    with PageWatch([area(array)]) as watch:
        array[7 * PAGE] = 1
        array.base.obj.flush()
        try:
            array.base.obj.madvise(advice)
        except OSError:
            pass  # nothing to collapse here, which is as good
        assert page_numbers(watch, array) == [7]
        assert array[7 * PAGE] == array[8 * PAGE] == 1
        array[20 * PAGE] = 1
        assert page_numbers(watch, array) == [7, 20]


def test_one_small_page_of_a_huge_one():
    """Huge pages are watched as small ones; they can be huge again after the watch."""
    nbytes = 2 * HUGE
    reserved = reserve(3 * HUGE // PAGE)
    base = -(-reserved // HUGE) * HUGE
    fd = os.memfd_create("m")
    os.posix_fallocate(fd, 0, nbytes)
    place(base, nbytes // PAGE, fd, mmap.PROT_READ | mmap.PROT_WRITE)
    os.close(fd)
    ctypes.memset(base, 1, nbytes)
    try:
        if _libc.madvise(base, nbytes, COLLAPSE) or not huge_kilobytes(base):
            pytest.skip("no huge pages to be had")
        with PageWatch([(base, nbytes)]) as watch:
            assert (watch.refused, watch.written()) == ("", [])
            for at in (3 * PAGE, HUGE + PAGE):
                ctypes.memset(base + at, 2, 1)
            assert watch.written() == [(base + 3 * PAGE, PAGE), (base + HUGE + PAGE, PAGE)]
            assert huge_kilobytes(base) == 0
        assert _libc.madvise(base, nbytes, mmap.MADV_DONTNEED) == 0
        content = ctypes.string_at(base, nbytes)
        assert (content.count(2), content.count(1)) == (2, nbytes - 2)
        assert huge_kilobytes(base) == nbytes >> 10
    finally:
        _libc.munmap(reserved, 3 * HUGE)


def huge_kilobytes(address):
    """Return how much of the mapping at an address is entered as huge pages."""
    return int(field_at(address, "ShmemPmdMapped:")[0])


@pytest.mark.by_turns
@pytest.mark.parametrize("kind", ["memfd", "disk"])
def test_memory_that_is_unmapped_or_replaced_meanwhile(kind, tmp_path):
    """What took its place is not reported, the rest is, and nothing stays protected."""
    base = reserve(32)
    fd = os.memfd_create("m")
    os.posix_fallocate(fd, 0, 32 * PAGE)
    place(base, 32, fd, mmap.PROT_READ | mmap.PROT_WRITE)
    with PageWatch([(base, 32 * PAGE)]) as watch:
        ctypes.memset(base + 2 * PAGE, 1, 1)
        ctypes.memset(base + 30 * PAGE, 1, 1)
        _libc.munmap(base + 8 * PAGE, 8 * PAGE)
        assert watch.written() == [(base + 2 * PAGE, PAGE), (base + 30 * PAGE, PAGE)]
        with tempfile.TemporaryFile(dir=tmp_path) as file:
            os.posix_fallocate(file.fileno(), 0, 4 * PAGE)
            place(
                base + 16 * PAGE, 4, file.fileno() if kind == "disk" else -1, mmap.PROT_READ | mmap.PROT_WRITE
            )
        ctypes.memset(base + 17 * PAGE, 1, PAGE)
        assert watch.written() == [(base + 2 * PAGE, PAGE), (base + 30 * PAGE, PAGE)]
        copy = os.dup(watch.protection.userfaultfd)  # closing alone would remove the protection, too
    assert not any(is_registered(base + at * PAGE) for at in range(32))
    os.close(copy)
    os.close(fd)
    with PageWatch([(base, 32 * PAGE)]) as watch:
        assert watch.refused == ""
        _libc.munmap(base, 32 * PAGE)
        assert watch.written() == []


def test_nothing_stays_behind(tmp_path):
    """Whether the block ends, raises, or is closed twice."""
    array = map_pages("memfd", tmp_path, 16)
    before = sorted(os.listdir("/proc/self/fd"))
    with PageWatch([area(array)]) as watch:
        assert is_registered(array.ctypes.data)
        assert len(os.listdir("/proc/self/fd")) == len(before) + 2
    watch.close()
    with pytest.raises(ZeroDivisionError), PageWatch([area(array)]):
        raise ZeroDivisionError
    assert not is_registered(array.ctypes.data)
    assert sorted(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("done", [False, True])
def test_an_interrupt_while_it_begins_leaves_nothing(done, monkeypatch, tmp_path):
    """Before the memory is protected, or just after."""
    array = map_pages("memfd", tmp_path, 16)
    before = sorted(os.listdir("/proc/self/fd"))
    protect = WriteProtection.protect

    def interrupted(*arguments):
        if done:
            protect(*arguments)
        raise KeyboardInterrupt

    monkeypatch.setattr(WriteProtection, "protect", interrupted)
    copies = []
    close = WriteProtection.close
    monkeypatch.setattr(
        WriteProtection, "close", lambda self: (copies.append(os.dup(self.userfaultfd)), close(self))
    )
    with pytest.raises(KeyboardInterrupt), PageWatch([area(array)]):
        pass
    assert not is_registered(array.ctypes.data)
    os.close(copies.pop())
    assert sorted(os.listdir("/proc/self/fd")) == before


def test_memory_that_cannot_be_protected_to_the_end_is_not_registered(monkeypatch, tmp_path):
    """All of it or nothing, while the descriptors stay in use for other memory."""
    array = map_pages("memfd", tmp_path, 16)

    def fails(*_arguments):
        raise MemoryError

    protection = WriteProtection()
    monkeypatch.setattr(WriteProtection, "scan", fails)
    with pytest.raises(MemoryError):
        protection.protect(array.ctypes.data, array.ctypes.data + array.nbytes)
    assert not is_registered(array.ctypes.data)
    protection.close()
