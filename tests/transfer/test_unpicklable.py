"""Objects that cannot travel: the error names the culprit, where it sits, and what to do."""

import mmap
import pickle
import sys
import threading

import pytest

from nbparallel.errors import UnpicklableError
from nbparallel.transfer.pickling import dumps, loads


class Holder:
    """Holds something that cannot travel."""

    def __init__(self, what):
        self.pool = [1, {"inner": what}]


@pytest.mark.parametrize(
    ("make", "where"),
    [
        (threading.Lock, "v.pool[1]['inner'], which is a _thread.lock"),
        (lambda: (i for i in ()), "turn the generator into a list"),
        (lambda: mmap.mmap(-1, 10), "which is a mmap.mmap"),
    ],
)
def test_unpicklable_names_the_culprit(store, make, where):
    """The error says the variable, where the culprit sits, what it is and what to do; programs know it."""
    with pytest.raises(UnpicklableError) as caught:
        dumps(Holder(make()), store, name="v")
    assert isinstance(caught.value, pickle.PicklingError)
    assert isinstance(caught.value, TypeError)
    assert "variable 'v' cannot be sent" in str(caught.value)
    assert where in str(caught.value)
    assert isinstance(caught.value.__cause__, TypeError | pickle.PicklingError)
    assert not store.roots


class Refusing(Holder):
    """Says itself that it cannot travel, as a pool of processes does."""

    def __reduce__(self):
        raise NotImplementedError("such objects cannot be pickled")


def test_an_object_that_refuses_is_the_culprit(store):
    """Where a class refuses to be pickled the error has its reason, and not what the object holds."""
    for value, where in ((Refusing(threading.Lock()), "it is a"), ([Refusing(1)], r"v\[0\], which is a")):
        with pytest.raises(
            UnpicklableError, match=rf"{where} .*Refusing \(NotImplementedError: such objects"
        ):
            dumps(value, store, name="v")


def test_what_cannot_be_left_out_of_itself(store):
    """Where the variable itself is the culprit, the advice is not to leave it out of itself."""
    with pytest.raises(UnpicklableError) as caught:
        dumps(threading.Lock(), store, name="v")
    assert str(caught.value).endswith("; create it inside the cell")
    with pytest.raises(UnpicklableError, match=r"leave it out of 'v' \(a __getstate__ can\)"):
        dumps(Holder(threading.Lock()), store, name="v")


class Reducing:
    """Reduces to whatever it is told."""

    def __init__(self, reduced):
        self.reduced = reduced

    def __reduce__(self):
        if isinstance(self.reduced, BaseException):
            raise self.reduced
        return self.reduced


@pytest.mark.parametrize(
    ("reduced", "cause"),
    [
        (5, pickle.PicklingError),
        (ValueError("mine"), ValueError),
        (SystemExit(3), SystemExit),
        ((exec, ("1/0",)), ZeroDivisionError),
        ((sys.exit, (3,)), SystemExit),
        ((int, ("x",)), ValueError),
        ((print, "not a tuple"), pickle.PicklingError),
    ],
)
def test_lying_reduce_is_a_clear_error(store, reduced, cause):
    """A reduction that lies or raises, here or there, is one error with the original as its cause."""
    with pytest.raises(UnpicklableError, match="variable 'v'") as caught:
        loads(dumps(Reducing(reduced), store, name="v").data, store, name="v")
    assert isinstance(caught.value.__cause__, cause)


def test_interrupt_is_not_swallowed(store):
    """A KeyboardInterrupt while pickling is one."""
    with pytest.raises(KeyboardInterrupt):
        dumps(Reducing(KeyboardInterrupt()), store)


def test_too_deep_nesting_says_so(store):
    """An object nested too deeply says that, at once."""
    deep = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(UnpicklableError, match="nested too deeply"):
        dumps(deep, store, name="deep")
    while deep:  # freeing it recursively would be slow
        deep = deep.pop()
