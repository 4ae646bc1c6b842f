"""Functions and classes of a notebook on their way: rebuilt in the receiver's namespace."""

import dataclasses

import pytest
from cloudpickle import cloudpickle

from nbparallel.errors import UnpicklableError
from nbparallel.transfer import definitions
from nbparallel.transfer.pickling import dumps, loads, serialise

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
