"""The leak check catches what it is there for, and nothing else."""

import os
from pathlib import Path

import pytest

LEAKY = """
import ctypes, mmap, os, signal, subprocess, sys, tempfile, threading, time
import pytest
from nbparallel.testing import leaks, processes

leaks.GRACE_SECONDS, processes.MOST_PATIENCE = 0.3, 1.0
KEEP = []

def test_clean():
    with open(os.devnull):
        assert True

def test_memfd():
    KEEP.append(os.memfd_create("nbp-test-0"))

def test_mapping():
    fd = os.memfd_create("nbp-test-1")
    os.ftruncate(fd, 4096)
    # the C function keeps no descriptor, as Python's mmap does
    libc = ctypes.CDLL(None)
    libc.mmap.restype = ctypes.c_void_p
    KEEP.append(libc.mmap(None, ctypes.c_size_t(4096), 3, 1, fd, ctypes.c_long(0)))
    os.close(fd)

def test_descriptor():
    KEEP.append(os.open(os.devnull, os.O_RDONLY))

def test_replaced_memfd():
    os.close(KEEP.pop())
    KEEP.append(os.memfd_create("nbp-test-2"))

def test_thread():
    event = threading.Event()
    KEEP.append(event)
    threading.Thread(target=event.wait, args=(60,), name="left-behind", daemon=True).start()

def test_process():
    KEEP.append(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]))

def test_orphan():
    code = "import os, time\\nif os.fork() == 0: time.sleep(600)\\nos._exit(0)"
    subprocess.run([sys.executable, "-S", "-c", code], start_new_session=True, check=True)

def test_zombie():
    if (pid := os.fork()) == 0:
        os._exit(0)

def test_stderr():
    os.write(2, b"resource_tracker: There appear to be 3 leaked shared_memory objects\\n")

@pytest.mark.may_leave("descriptor", reason="shows that a mark excuses one kind")
def test_excused():
    KEEP.append(os.open(os.devnull, os.O_RDONLY))

def test_name():
    subprocess.run(["touch", "/dev/shm/nbp-testground-%d" % os.getpid()], check=True)

def test_name_of_others():
    for name in "/dev/shm/nbp-others-%d", "/dev/shm/sem.nbp-others-%d", "/tmp/pymp-others-%d":
        open(name % os.getpid(), "w").close()

def test_folder():
    tempfile.mkdtemp(prefix="pymp-")

def test_name_is_there_before():
    for name in "testground-%d", "others-%d":
        os.unlink("/dev/shm/nbp-" + name % os.getpid())
    for name in "/dev/shm/sem.nbp-others-%d", "/tmp/pymp-others-%d":
        os.unlink(name % os.getpid())

def test_handler():
    signal.signal(signal.SIGINT, lambda *_: None)

@pytest.fixture(scope="module")
def server():
    process = subprocess.Popen([sys.executable, "-S", "-c",
        "import os; os.read(0, 1); os.fork() or os.write(1, b'.'); os.read(0, 1)"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    yield process
    process.communicate()

def test_child_of_a_fixtures_process(server):
    server.stdin.write(b"x"); server.stdin.flush()
    assert server.stdout.read(1) == b"."
"""


@pytest.mark.slow
@pytest.mark.time_limit(60)
def test_every_kind_of_leak_is_caught(pytester: pytest.Pytester) -> None:
    """What stays behind is named, by kind; clean tests pass, and so does what a longer-lived fixture owns."""
    pytester.makepyfile(LEAKY)
    result = pytester.runpytest_subprocess("-p", "nbparallel.testing.plugin", "-rA", timeout=50)
    text = result.stdout.str()
    failed = {
        line.split("::")[1].split()[0] for line in text.splitlines() if line.startswith(("ERROR ", "FAILED "))
    }
    assert failed == {
        "test_memfd",
        "test_mapping",
        "test_descriptor",
        "test_replaced_memfd",
        "test_thread",
        "test_process",
        "test_orphan",
        "test_zombie",
        "test_stderr",
        "test_name",
        "test_folder",
        "test_handler",
    }, text
    for promised in (
        "memfd:nbp-test-0",
        "1 more of /memfd:nbp-test-1 (deleted)",
        "/dev/null",
        "memfd:nbp-test-2",
        "thread: left-behind",
        "import time; time.sleep(600)",
        "state Z",
        "3 leaked shared_memory objects",
        "name: /dev/shm/nbp-testground-",
        "/pymp-",
        "handler: of SIGINT: <function test_handler",
    ):
        assert promised in text, promised


FOREIGN = '''
import os, subprocess, sys

def test_foreign_process():
    """A process of somebody else that happens to start now is not ours."""
    mark = os.environ.pop("NBP_TEST_RUN")
    try:
        code = "import os\\nif os.fork() == 0: os.execv('/bin/sleep', ['sleep', '2'])\\nos._exit(0)"
        subprocess.run([sys.executable, "-S", "-c", code], check=True, stdout=subprocess.DEVNULL)
    finally:
        os.environ["NBP_TEST_RUN"] = mark
'''


def test_processes_of_others_are_left_alone(pytester: pytest.Pytester) -> None:
    """A process that neither descends from the run nor bears its mark is not counted and not killed."""
    pytester.makepyfile(FOREIGN)
    result = pytester.runpytest_subprocess("-p", "nbparallel.testing.plugin", timeout=15)
    result.assert_outcomes(passed=1)


TWO_WORKERS = """
import os, subprocess, sys, time
from pathlib import Path
import pytest
from nbparallel.testing import leaks, processes
from nbparallel.testing.waiting import wait_until

leaks.GRACE_SECONDS, processes.MOST_PATIENCE = 0.1, 1.0
NAME, HERE = Path(NAME_PATH), Path(__file__).parent

def test_that_ends_first():
    subprocess.run(["true"], check=True)
    wait_until(NAME.exists)
    (HERE / "ending").touch()

def test_whose_processes_are_dead():
    NAME.touch()
    wait_until((HERE / "ending").exists)
    time.sleep(3)  # longer than the other one waits for names to vanish
    REMOVE
"""


@pytest.mark.slow
@pytest.mark.parametrize("removed", [True, False])
def test_a_name_of_another_workers_test(pytester: pytest.Pytester, removed: bool) -> None:
    """No test is blamed for a name that another worker's test removes at its end, but for one that stays."""
    name = Path(f"/dev/shm/nbp-testground-{os.getpid()}")
    text = TWO_WORKERS.replace("NAME_PATH", repr(str(name)))
    pytester.makepyfile(text.replace("REMOVE", "NAME.unlink()" if removed else "pass"))
    try:
        result = pytester.runpytest_subprocess(
            "-p", "nbparallel.testing.plugin", "-n", "2", "--dist", "load", timeout=60
        )
        assert name.exists() is not removed
    finally:
        name.unlink(missing_ok=True)
    outcomes = result.parseoutcomes()
    assert set(outcomes) == {"passed"} | (set() if removed else {"errors"}), outcomes
    assert outcomes["passed"] == 2
