"""What a cell need not do four times is done once."""

import numpy as np
import pytest
from IPython.core.inputtransformer2 import TransformerManager

import nbparallel as nbp
from nbparallel.session import Session
from nbparallel.session.processes.rank_handle import RankHandle
from nbparallel.session.tasks import cell
from tests.harness.ranks import rank_pool


@pytest.fixture(scope="module")
def four():
    """Give four ranks to all tests of this module."""
    with Session(4) as session:
        session.run("pass")
        yield session


@pytest.mark.slow
def test_whoever_waits_for_a_cell_is_woken_once(four, monkeypatch):
    """Only the last rank's outcome wakes the notebook's thread; all of them are taken."""
    pool, woken = rank_pool(four), []
    monkeypatch.setattr(pool, "wake", lambda wake=pool.wake: (woken.append(0), wake()))
    result = four.run("barrier(); rank")  # all have begun before one has ended
    assert result.values == [0, 1, 2, 3]
    assert len(woken) == 1


@pytest.mark.slow
def test_a_failure_wakes_at_once(four, monkeypatch):
    """Nobody waits for the others before a failure is acted on: these two never end by themselves."""
    pool, woken = rank_pool(four), []
    monkeypatch.setattr(pool, "wake", lambda wake=pool.wake: (woken.append(0), wake()))
    with pytest.raises(nbp.errors.ParallelError, match="ZeroDivisionError on rank 3"):
        four.run("if rank == 3:\n    1 / 0\nif rank < 2:\n    recv(src=3)")
    assert len(woken) >= 2


def test_a_task_that_is_the_same_for_all_is_pickled_once(four, monkeypatch):
    """Ranks that need the same get the very same bytes; one that has the array already gets other ones."""
    sent = []

    def send(self, kind, message, *args, send=RankHandle.send_pickled, **keywords):
        sent.append(message)
        send(self, kind, message, *args, **keywords)

    four.run("pass")  # pytest has a variable for each test, which ranks have from now on
    monkeypatch.setattr(RankHandle, "send_pickled", send)
    names = {"x": nbp.zeros(3)}
    four.run("x.sum()", namespace=names, ranks=[1])
    sent.clear()
    assert four.run("float(x.sum())", namespace=names).values == [0.0] * 4
    assert [message is sent[0] for message in sent] == [True, False, False, False]
    assert sent[2] is sent[3]
    assert len(sent[1]) < len(sent[0])
    names.clear()
    four.run("pass", namespace=names)


def test_a_cell_that_compiled_is_not_compiled_again(monkeypatch):
    """A loop that runs the same cell pays once; what does not compile raises every time."""
    cell.check_source("some_name = 1")
    with monkeypatch.context() as patch:
        patch.setattr(TransformerManager, "transform_cell", None)
        cell.check_source("some_name = 1")
        with pytest.raises(TypeError):
            cell.check_source("some_name = 2")
    for count in (1, 2):
        with pytest.raises(SyntaxError) as caught:
            cell.check_source("a b", execution_count=count)
        assert caught.value.filename == f"In[{count}]"
    for number in range(200):
        cell.check_source(f"a{number} = 1")
    assert cell.compile_cell.cache_info().currsize <= cell.MOST_COMPILED


def test_a_handle_says_what_receivers_may_do(four):
    """With `writable` None: they may write where all may, unless this very array is flagged read-only."""
    store = nbp.sharing.current_store()
    mine, private = nbp.share(np.zeros(3)), store.share(np.zeros(100_000))
    assert [store.handle(x, writable=None).writable for x in (mine, private)] == [True, False]
    frozen = mine.view()
    frozen.flags.writeable = False
    assert not store.handle(frozen, writable=None).writable
    assert store.handle(np.zeros(3), writable=None) is None
