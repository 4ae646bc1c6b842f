"""``input()`` on ranks in a real kernel: one is asked, several are refused, nobody hangs."""

from __future__ import annotations

import pytest

from tests.harness.kernel import Kernel
from tests.magics.cells import printed, with_ranks

pytestmark = pytest.mark.time_limit(90)


def still_there(kernel: Kernel) -> bool:
    """Whether the ranks work and have kept their variables."""
    return printed(kernel.run("%parallel kept")) == "Out[rank 0]: 7\nOut[rank 1]: 8\n"


def test_one_rank_asks_and_gets_the_answer(shared_kernel: Kernel) -> None:
    """The prompt names the rank, ``getpass`` hides the answer, questions one after the other are fine."""
    kernel = with_ranks(shared_kernel)
    cell = kernel.begin(
        "%%parallel\nimport getpass\nprint('before')\n"
        "name = broadcast(input('name? ') if rank == 0 else None)\n"
        "word = broadcast(getpass.getpass() if rank == 1 else None, src=1)\nprint(name, word)",
        allow_stdin=True,
    )
    assert kernel.question() == ("[rank 0] name? ", False)
    kernel.answer("Ada")
    assert kernel.question() == ("[rank 1] Password: ", True)
    kernel.answer("secret")
    outcome = cell.wait()
    assert outcome.status == "ok", outcome.traceback
    assert printed(outcome).endswith("[ranks 0-1]\nbefore\nAda secret\n")
    assert still_there(kernel)


@pytest.mark.slow
def test_several_ranks_at_once_are_refused(shared_kernel: Kernel) -> None:
    """Nobody is asked; the error says what to write instead."""
    kernel = with_ranks(shared_kernel)
    outcome = kernel.begin("%%parallel\ninput('all? ')", allow_stdin=True).wait()
    assert outcome.ename == "ParallelError"
    assert "InputRefusedError on ranks 0-1, line 2" in outcome.evalue
    assert "`if rank == 0:`" in outcome.evalue
    with pytest.raises(TimeoutError):
        kernel.question(0.2)
    assert still_there(kernel)


@pytest.mark.slow
def test_a_front_end_that_cannot_ask_is_told(shared_kernel: Kernel) -> None:
    """As in nbclient and papermill."""
    kernel = with_ranks(shared_kernel)
    outcome = kernel.begin("%%parallel -r 1\ninput('x? ')").wait()
    assert outcome.ename == "ParallelError"
    assert "no user can be asked for input()" in outcome.evalue
    assert still_there(kernel)


@pytest.mark.slow
@pytest.mark.fault("F20")
def test_an_interrupt_ends_the_question(shared_kernel: Kernel) -> None:
    """The cell ends in KeyboardInterrupt; the ranks are there, the next cell runs and can ask."""
    kernel = with_ranks(shared_kernel)
    cell = kernel.begin("%%parallel\nrank == 0 and input('stuck? ')\nbarrier()", allow_stdin=True)
    kernel.question()
    kernel.interrupt()
    assert cell.wait().ename == "KeyboardInterrupt"
    assert still_there(kernel)
    again = kernel.begin("%%parallel -r 0\ninput('again? ')", allow_stdin=True)
    kernel.question()
    kernel.answer("yes")
    assert printed(again.wait()).endswith("Out[rank 0]: 'yes'\n")


@pytest.mark.slow
@pytest.mark.matrix(cover=())
@pytest.mark.fault("F2", "F5")
@pytest.mark.parametrize("end", ["raise ValueError('mine')", "os.kill(os.getpid(), 9)"])
def test_another_ranks_failure_ends_the_question(shared_kernel: Kernel, end: str) -> None:
    """Who is asked is not left alone with a question that nobody needs any more."""
    kernel = with_ranks(shared_kernel)
    cell = kernel.begin(
        f"%%parallel\nimport os, time\nif rank == 0:\n    input('needed? ')\ntime.sleep(0.5)\n{end}",
        allow_stdin=True,
    )
    kernel.question()
    outcome = cell.wait()
    assert outcome.ename == "ParallelError"
    assert "rank 1" in outcome.evalue
    assert "line 6" in outcome.evalue
    assert kernel.run("%parallel 1;").status == "ok"


@pytest.mark.slow
@pytest.mark.fault("F20")
def test_the_time_out_ends_the_question(shared_kernel: Kernel) -> None:
    """``--timeout`` holds while the user is asked."""
    kernel = with_ranks(shared_kernel)
    cell = kernel.begin("%%parallel --timeout 0.7\nrank == 0 and input('slow? ')", allow_stdin=True)
    kernel.question()
    assert cell.wait().ename == "CellTimeoutError"
    assert still_there(kernel)


@pytest.mark.slow
def test_a_cell_in_the_background_cannot_ask(shared_kernel: Kernel) -> None:
    """Its error says so."""
    kernel = with_ranks(shared_kernel)
    kernel.run("%%parallel --async\nrank == 0 and input('hm? ')")
    outcome = kernel.begin("%parallel_result", allow_stdin=True).wait()
    assert "runs in the background" in outcome.evalue
    assert still_there(kernel)
