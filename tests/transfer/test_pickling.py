"""Objects on their way: what arrives, what is copied, what is refused."""

import dataclasses
import mmap
import os
import pickle
import sys
import threading

import numpy as np
import pytest
from cloudpickle import cloudpickle
from hypothesis import given
from hypothesis import strategies as st

from nbparallel.errors import ProtocolError, UnpicklableError
from nbparallel.transfer import definitions
from nbparallel.transfer.checksum import checksum_buffer
from nbparallel.transfer.pickling import LARGE, dumps, loads, serialise
from tests.transfer.standin import StandinStore

NOTEBOOK = """
import abc, dataclasses, enum, functools, typing
def factorial(n): return 1 if n == 0 else n * factorial(n - 1)
def make_counter():
    count = 0
    def increment():
        nonlocal count
        count += 1
        return count
    def get(): return count
    return increment, get
increment, get = make_counter()
class Base:
    factor = 2
    def who(self): return rank
    @staticmethod
    def static(): return rank + 1
    @classmethod
    def of_class(cls): return cls.factor * rank
    @property
    def double(self): return self.factor * rank
    @functools.cached_property
    def cached(self): return rank
class Derived(Base):
    def who(self): return super().who() + 100
@dataclasses.dataclass
class Record:
    number: int
    items: list = dataclasses.field(default_factory=list)
    other: Derived | None = None
class Colour(enum.Enum):
    RED = 1
class Abstract(abc.ABC):
    @abc.abstractmethod
    def run(self): ...
class Pair(typing.NamedTuple):
    left: int
    right: str = "r"
class Slotted:
    __slots__ = ("a",)
@functools.lru_cache(maxsize=3)
def remembered(n): return n * rank
@functools.singledispatch
def dispatched(x): return rank
@dispatched.register
def _(x: int): return "int"
def with_defaults(a, b=[1], *, c: int = 3): return a, b, c, rank
class Left:
    def partner(self): return Right
class Right:
    def partner(self): return Left
Left.friend = Right; Right.friend = Left
derived = Derived()
"""


@pytest.fixture
def store():
    """Return a store that is emptied afterwards."""
    store = StandinStore()
    yield store
    store.close()


@pytest.fixture
def notebook():
    """Return the namespace of a notebook that ran `NOTEBOOK`."""
    namespace = {"__name__": "__main__"}
    exec(NOTEBOOK, namespace)
    return namespace


@pytest.fixture
def rank_globals():
    """Return a rank's namespace; this process forgets the notebook's classes as another would."""
    yield {"__name__": "__main__", "rank": 3}
    forget_classes()


def forget_classes():
    """Make this process know no class of a notebook, as a rank that just started."""
    cloudpickle._DYNAMIC_CLASS_TRACKER_BY_ID.clear()
    definitions.KNOWN.clear()


def travel(notebook, rank_globals, store, *names):
    """Send the values of some names of the notebook to the rank; return them there."""
    pickled = dumps([notebook[name] for name in names], store, main_globals=notebook)
    forget_classes()
    values = loads(pickled.data, store, main_globals=rank_globals)
    rank_globals.update(zip(names, values, strict=True))
    return values


def in_child(action):
    """Run `action` in a forked child; fail if it raises there."""
    pid = os.fork()
    if pid == 0:
        try:
            action()
        except BaseException as error:  # noqa: BLE001  whatever it is, the parent has to hear of it
            print(repr(error), file=sys.stderr, flush=True)
            os._exit(1)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_shared_arrays_inside_objects_travel_as_handles(store):
    """A shared array, and a view of it, inside any object is the same memory for the receiver."""
    x = store.empty((1000, 1000))
    x[:] = 0
    pickled = dumps({"deep": [(x, x[2:4, ::2])], "same": x}, store)
    assert len(pickled.data) < 2000
    got = loads(pickled.data, store)
    x[2, 4] = 7
    whole, view = got["deep"][0]
    assert whole[2, 4] == view[0, 2] == 7
    assert got["same"] is whole
    assert pickled.segments == (1,)
    assert pickled.keep[0] is x


def test_shared_array_arrives_with_its_rights(store):
    """An array is writable for the receiver only if it was shared for writing and its flag allows it."""
    x = store.empty((4,))
    assert not loads(dumps([x], store).data, store)[0].flags.writeable
    store.open.add(1)
    assert loads(dumps([x], store).data, store)[0].flags.writeable
    x.flags.writeable = False
    assert not loads(dumps([x], store).data, store)[0].flags.writeable


def test_large_buffers_lie_once_in_a_segment(store):
    """Two receivers of a large buffer map the same segment, and a write of one is not seen by anybody."""
    x = np.arange(100_000.0)
    pickled = dumps({"x": x, "y": np.ones(5)}, store)
    assert len(pickled.data) < 2000
    assert len(pickled.segments) == 1
    first, second = loads(pickled.data, store), loads(pickled.data, store)
    first["x"][0] = 99
    first["y"][0] = 99
    assert second["x"][0] == 0
    np.testing.assert_array_equal(loads(pickled.data, store)["x"], x)


def test_private_mapping_through_a_second_process(store):
    """What a receiver in another process writes to its large buffer stays there."""
    pickled = dumps(np.zeros(LARGE), store)

    def receive():
        mine = loads(pickled.data, store)
        mine[:] = 5
        assert mine.sum() == 5 * LARGE
        base = mine
        while isinstance(base, np.ndarray):
            base = base.base
        assert isinstance(base.obj if isinstance(base, memoryview) else base, np.ndarray | mmap.mmap)

    in_child(receive)
    assert loads(pickled.data, store).sum() == 0


@pytest.mark.parametrize(
    "x",
    [
        np.ones((600, 600))[:, ::2],
        np.asfortranarray(np.arange(1e5).reshape(100, 1000)),
        np.arange(1e5)[::-1],
        np.zeros(50_000, dtype=[("a", "<i4"), ("b", "<f8")]),
    ],
    ids=["gaps", "fortran", "reversed", "structured"],
)
def test_any_layout_goes_out_of_band(store, x):
    """A large array of any layout does not swell the stream."""
    pickled = dumps(x, store)
    assert len(pickled.data) < 2000
    np.testing.assert_array_equal(loads(pickled.data, store), x)


def test_read_only_buffers_stay_read_only(store):
    """A large read-only array arrives read-only, a writable one writable."""
    x = np.arange(1e5)
    assert loads(dumps(x, store).data, store).flags.writeable
    x.flags.writeable = False
    assert not loads(dumps(x, store).data, store).flags.writeable


def test_large_stream_lies_in_the_segment(store):
    """A large object without buffers (a long list) is written once too, not sent to each rank."""
    numbers = list(range(200_000))
    pickled = dumps(numbers, store)
    assert len(pickled.data) < 200
    assert loads(pickled.data, store) == numbers


def test_functions_live_in_the_receivers_namespace(store, notebook, rank_globals):
    """A notebook's function sees the rank's globals; recursion, defaults and caches work."""
    factorial, remembered, with_defaults, dispatched = travel(
        notebook, rank_globals, store, "factorial", "remembered", "with_defaults", "dispatched"
    )
    assert (dispatched(1), dispatched("a"), dispatched.__name__) == ("int", 3, "dispatched")
    assert factorial.__globals__ is rank_globals
    assert factorial(5) == 120
    assert remembered(4) == 12
    assert with_defaults(0) == (0, [1], 3, 3)
    assert with_defaults.__annotations__ == {"c": int}
    rank_globals["rank"] = 8
    assert with_defaults(0)[-1] == 8


def test_closures_go_on_sharing_their_variables(store, notebook, rank_globals):
    """Two closures over one variable still share it (cloudpickle gives each its own)."""
    increment, get = travel(notebook, rank_globals, store, "increment", "get")
    increment()
    increment()
    assert get() == 2
    assert notebook["get"]() == 0


def test_classes_are_rebuilt(store, notebook, rank_globals):
    """Methods of every kind, inheritance, enums, records, named tuples and abstract classes work."""
    names = ["Derived", "Base", "Record", "Colour", "Abstract", "Pair", "Slotted", "Left", "Right", "derived"]
    derived_class, base, record, colour, abstract, pair, slotted, left, right, derived = travel(
        notebook, rank_globals, store, *names
    )
    assert isinstance(derived, derived_class)
    assert issubclass(derived_class, base)
    assert (derived.who(), base.static(), base.of_class(), derived.double, derived.cached) == (
        103,
        4,
        6,
        6,
        3,
    )
    assert record(1) == record(1, [], None)
    assert colour(1) is colour.RED
    assert pair(1).right == "r"
    assert slotted.__slots__ == ("a",)
    assert left.friend is right
    assert right().partner() is left
    with pytest.raises(TypeError):
        abstract()
    exec(
        "import dataclasses\n@dataclasses.dataclass\nclass More(Record):\n    extra: int = 0\nmore = More(3)",
        rank_globals,
    )
    assert dataclasses.asdict(rank_globals["more"]) == {"number": 3, "items": [], "other": None, "extra": 0}


def test_later_instances_belong_to_the_rebuilt_class(store, notebook, rank_globals):
    """An instance sent later is one of the class that came first, whose methods it does not touch."""
    (cls,) = travel(notebook, rank_globals, store, "Base")
    cls.factor = 50  # the rank's own change
    again = loads(
        dumps(notebook["Base"](), store, main_globals=notebook).data, store, main_globals=rank_globals
    )
    assert type(again) is cls
    assert cls.factor == 50
    assert cls.who.__globals__ is rank_globals


def test_class_apart_needs_its_definition(store, notebook, rank_globals):
    """A stream that only refers to a class says so when the definition is missing."""
    serialised = serialise(notebook["derived"], store, main_globals=notebook, apart=True)
    assert serialised.classes == (notebook["Derived"],)
    data = serialised.pack(store).data
    assert type(loads(data, store, main_globals=rank_globals)) is notebook["Derived"]
    forget_classes()
    with pytest.raises(UnpicklableError, match="class 'Derived' has not arrived"):
        loads(data, store, main_globals=rank_globals)


def test_class_from_the_same_source_is_the_receivers_own(store, rank_globals):
    """An instance of a class that every rank defined by the same cell arrives as the receiver's class."""
    source = "class Point:\n    def norm(self): return rank\np = Point()"
    other = {"__name__": "__main__", "rank": 0}
    exec(source, other)
    exec(source, rank_globals)
    data = dumps(other["p"], store, main_globals=other).data
    forget_classes()
    got = loads(data, store, main_globals=rank_globals)
    assert type(got) is rank_globals["Point"]
    assert got.norm() == 3


def test_names_that_functions_use_are_reported(store, notebook):
    """Pickling tells which global names the functions inside read."""
    assert serialise(notebook["factorial"], store, main_globals=notebook).global_names == {"factorial"}
    assert "rank" in serialise(notebook["Derived"], store, main_globals=notebook).global_names


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
    """The error says the variable, where the culprit sits, what it is and what to do."""
    with pytest.raises(UnpicklableError) as caught:
        dumps(Holder(make()), store, name="v")
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


def test_cycles_travel(store):
    """An object that contains itself arrives as one that contains itself."""
    ring = [1]
    ring.append(ring)
    got = loads(dumps(ring, store).data, store)
    assert got[1] is got


@given(st.binary(max_size=200))
def test_damaged_messages_are_refused(data):
    """Bytes that are no message are an error of ours, never a crash."""
    store = StandinStore()
    with pytest.raises(ProtocolError):
        loads(data, store)


@given(st.integers(0, 300_000 - 1), st.integers(1, 255))
def test_checksum_sees_every_byte(position, change):
    """Changing any one byte of a large buffer changes its checksum."""
    data = bytearray(300_000)
    before = checksum_buffer(memoryview(data))
    data[position] ^= change
    assert checksum_buffer(memoryview(data)) != before


def test_checksum_sees_a_swap():
    """The order of the words counts."""
    x = np.arange(100_000)
    before = checksum_buffer(memoryview(x).cast("B"))
    x[[1, 9]] = x[[9, 1]]
    assert checksum_buffer(memoryview(x).cast("B")) != before


@given(
    st.recursive(st.integers() | st.text() | st.binary(), lambda inner: st.lists(inner) | st.tuples(inner))
)
def test_plain_values_round_trip(value):
    """Any nest of plain values arrives equal."""
    assert loads(dumps(value, StandinStore()).data, StandinStore()) == value
