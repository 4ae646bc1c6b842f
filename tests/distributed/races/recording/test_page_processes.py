"""Written pages beside other processes, after forks and deaths, and where the system refuses to watch."""

import ctypes
import errno
import mmap
import os
import signal
import traceback

import numpy as np
import pytest

from nbparallel.distributed.races.recording import write_protection, written_pages
from nbparallel.distributed.races.recording.written_pages import PageWatch
from tests.distributed.races.refused_calls import IOCTL, USERFAULTFD, refuse

PAGE = mmap.PAGESIZE
API, REGISTER, SCAN = (
    write_protection.UFFDIO_API,
    write_protection.UFFDIO_REGISTER,
    write_protection.PAGEMAP_SCAN,
)
_libc = ctypes.CDLL(None, use_errno=True)

pytestmark = pytest.mark.by_turns


def shared_pages():
    """Return sixteen pages that forked children share."""
    return np.frombuffer(mmap.mmap(-1, 16 * PAGE), np.uint8)


def watch_of(array):
    """Return a watch of an array's memory."""
    return PageWatch([(array.ctypes.data, array.nbytes)])


def numbers(watch, array):
    """Return the numbers of an array's pages that were written."""
    return [
        page
        for address, nbytes in watch.written()
        for page in range(
            (address - array.ctypes.data) // PAGE, (address - array.ctypes.data + nbytes) // PAGE
        )
    ]


class Child:
    """A forked process that runs a function, and says at the end what came of it."""

    def __init__(self, function, *arguments):
        self._answers, answer = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                text = str(function(*arguments))
            except BaseException:  # noqa: BLE001 - the parent shows it
                text = traceback.format_exc()
            os.write(answer, text.encode())
            os._exit(0)
        os.close(answer)

    def answer(self):
        """Wait for the end of the process; return what it said."""
        with os.fdopen(self._answers) as file:
            text = file.read()
        self.status = os.waitpid(self.pid, 0)[1]
        return text


class Gate:
    """A point that a process passes when another has opened it."""

    def __init__(self):
        self.ends = os.pipe()

    def open(self):
        """Let the other process pass."""
        os.write(self.ends[1], b"x")

    def wait(self):
        """Wait until another process opens the gate."""
        assert os.read(self.ends[0], 1) == b"x"

    def close(self):
        """Close both ends."""
        for end in self.ends:
            os.close(end)


@pytest.fixture
def gates():
    """Two gates."""
    made = Gate(), Gate()
    yield made
    for gate in made:
        gate.close()


def test_writes_of_another_process_do_not_count(gates):
    """Nor are they hindered: each process sees its own pages only."""
    shared = shared_pages()
    begun, wrote = gates

    def other():
        begun.wait()
        with watch_of(shared) as watch:
            shared[PAGE * 3] = 3
            shared[PAGE * 4] = 4
            wrote.open()
            begun.wait()  # our own process has written by now
            return watch.refused, numbers(watch, shared)

    child = Child(other)
    with watch_of(shared) as watch:
        begun.open()
        wrote.wait()
        assert (shared[PAGE * 3], shared[PAGE * 4]) == (3, 4)
        assert numbers(watch, shared) == []
        shared[PAGE * 4] = shared[PAGE * 9] = 9
        begun.open()
        assert child.answer() == "('', [3, 4])"
        assert numbers(watch, shared) == [4, 9]


def test_a_child_that_is_forked_meanwhile_watches_nothing():
    """What it writes does not count; it may watch by itself; and it does not end the parent's watch."""
    shared = shared_pages()
    descriptors = len(os.listdir("/proc/self/fd"))
    with watch_of(shared) as watch:

        def child():
            shared[PAGE * 3] = 3
            found = watch.written(), len(os.listdir("/proc/self/fd")) - descriptors
            with watch_of(shared) as own:
                shared[PAGE * 5] = 5
                found = *found, own.refused, numbers(own, shared)
            watch.close()
            return *found, watch.refused

        shared[0] = 1
        # one descriptor more: the pipe of its answer, of which the parent's end is open there, too
        assert Child(child).answer() == str(
            ([], 2, "", [5], written_pages.UNSEEN + "this process was forked from the one that is watched")
        )
        shared[PAGE * 7] = 7
        assert (watch.refused, numbers(watch, shared)) == ("", [0, 7])
    assert list(shared[:: 1 * PAGE][[0, 3, 5, 7]]) == [1, 3, 5, 7]


def test_private_memory_after_a_fork():
    """Pages that are copied because a child shares them were written, and others were not."""
    private = np.frombuffer(mmap.mmap(-1, 16 * PAGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), np.uint8)
    private[:] = 1
    with watch_of(private) as watch:
        private[0] = 2

        def child():
            private[PAGE * 3] = 3
            return private[0], private[PAGE]

        assert Child(child).answer() == str((private[0], private[PAGE]))
        private[PAGE * 7] = 7
        assert numbers(watch, private) == [0, 7]
        assert private[PAGE * 3] == 1


def test_a_killed_process_leaves_nothing(gates):
    """Its parent can use and watch the memory as before."""
    shared = shared_pages()
    armed, never = gates

    def child():
        with watch_of(shared):
            shared[PAGE] = 1
            armed.open()
            never.wait()

    victim = Child(child)
    armed.wait()
    os.kill(victim.pid, signal.SIGKILL)
    assert (victim.answer(), victim.status) == ("", signal.SIGKILL)
    with watch_of(shared) as watch:
        shared[PAGE * 2] = 2
        assert (watch.refused, numbers(watch, shared)) == ("", [2])
    assert (shared[PAGE], shared[PAGE * 2]) == (1, 2)


def test_a_started_program_gets_no_descriptor():
    """Neither of the two survives exec."""
    shared = shared_pages()
    with watch_of(shared) as watch:
        kept = watch.protection.userfaultfd, watch.protection.pagemap
        assert not any(os.get_inheritable(fd) for fd in kept)


def test_a_page_is_in_one_watch_at_a_time():
    """The second one says so, watches what is free, and does not disturb the first."""
    shared = shared_pages()
    with PageWatch([(shared.ctypes.data, 8 * PAGE)]) as first:
        with watch_of(shared) as second:
            shared[PAGE] = shared[PAGE * 9] = 1
            assert numbers(second, shared) == [9]
        assert "(32.0 KiB)" in second.refused
        assert "another userfaultfd" in second.refused
        shared[PAGE * 3] = 1
        assert numbers(first, shared) == [1, 3]
        with PageWatch([(shared.ctypes.data, PAGE)]) as third:
            pass
        assert third.refused
        assert (first.refused, numbers(first, shared)) == ("", [1, 3])


def test_code_that_closes_all_descriptors_ends_the_watch():
    """It is said, not raised."""
    shared = shared_pages()
    with watch_of(shared) as watch:
        shared[0] = 1
        for fd in (watch.protection.userfaultfd, watch.protection.pagemap):
            os.close(fd)
        assert watch.written() == []
        assert "Bad file descriptor" in watch.refused


@pytest.mark.skipif(os.geteuid() != 0, reason="no rights are tried by each test here, then")
def test_no_rights_are_needed():
    """A user without any can watch, and what the system writes for it counts, too."""
    shared = shared_pages()

    def child():
        os.setgroups([])
        os.setresgid(65534, 65534, 65534)
        os.setresuid(65534, 65534, 65534)
        _libc.prctl(4, 1, 0, 0, 0)  # PR_SET_DUMPABLE: else /proc/self stays root's
        read_end, write_end = os.pipe()
        os.write(write_end, b"x")
        with watch_of(shared) as watch:
            shared[PAGE * 2] = 2
            os.readv(read_end, [memoryview(shared)[PAGE * 5 : PAGE * 6]])
            return watch.refused, numbers(watch, shared)

    assert Child(child).answer() == "('', [2, 5])"


@pytest.mark.skipif(IOCTL < 0, reason="numbers of system calls are known for few machines")
@pytest.mark.parametrize(
    ("system_call", "error", "request_", "words"),
    [
        (
            USERFAULTFD,
            errno.EPERM,
            None,
            "refuses userfaultfd (Operation not permitted); a container's seccomp",
        ),
        (USERFAULTFD, errno.ENOSYS, None, "refuses userfaultfd (Function not implemented); a container's"),
        (USERFAULTFD, errno.EINVAL, None, "it takes Linux 6.7 or newer, and this is Linux "),
        (USERFAULTFD, errno.EMFILE, None, "userfaultfd failed (Too many open files)"),
        (IOCTL, errno.EINVAL, API, "it takes Linux 6.7 or newer, and this is Linux "),
        (IOCTL, errno.EPERM, API, "refuses userfaultfd (Operation not permitted); a container's seccomp"),
        (IOCTL, errno.EINVAL, REGISTER, "cannot be write-protected by page (64.0 KiB)"),
        (IOCTL, errno.ENOMEM, REGISTER, "too many mappings (vm.max_map_count) (64.0 KiB)"),
        (IOCTL, errno.EPERM, REGISTER, "Operation not permitted (64.0 KiB)"),
        (IOCTL, errno.ENOTTY, SCAN, "it takes Linux 6.7 or newer, and this is Linux "),
    ],
)
def test_where_the_system_refuses_a_sentence_says_why(system_call, error, request_, words):
    """Old kernels and containers, each by a filter as theirs: no error, and no descriptor stays."""
    shared = shared_pages()

    def child():
        refuse(system_call, error, request_)
        before = len(os.listdir("/proc/self/fd"))
        with watch_of(shared) as watch:
            open_ = len(os.listdir("/proc/self/fd")) - before
            shared[0] = 1
            return f"{watch.written()} {open_} {watch.refused}"

    answer = Child(child).answer()
    assert answer.startswith("[] 0 " + written_pages.UNSEEN)
    assert words in answer
    assert shared[0] == 1


def test_where_no_descriptor_is_left_it_is_said():
    """The first of the two can be had, the second cannot."""
    shared = shared_pages()

    def child():
        import resource

        free = os.dup(0)
        os.close(free)
        resource.setrlimit(resource.RLIMIT_NOFILE, (free + 1, free + 1))
        with watch_of(shared) as watch:
            shared[0] = 1
            return watch.written(), watch.refused

    answer = Child(child).answer()
    assert answer == str(
        ([], written_pages.UNSEEN + "/proc/self/pagemap cannot be opened (Too many open files)")
    )
