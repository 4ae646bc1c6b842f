"""Functions and classes of a notebook on their way: rebuilt in the receiver's namespace."""

import contextlib
import dataclasses
import inspect
import io
import linecache
import subprocess
import sys
import types
import typing
import urllib.error
import xml.dom.minidom

import pytest
from cloudpickle import cloudpickle

from nbparallel.errors import UnpicklableError
from nbparallel.transfer import definitions
from nbparallel.transfer.pickling import dump_error, dumps, load_error, loads, serialise

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
    assert with_defaults.__annotations__ == {"c": int if sys.version_info < (3, 14) else "int"}
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
    slotted().a = 1
    with pytest.raises(AttributeError):
        slotted().misspelt = 1
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
    assert tuple(serialised.classes.values()) == (notebook["Derived"],)
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


def test_slots_that_need_care(store, rank_globals):
    """Private names, several bases, frozen records, `__dict__` among the slots: all are slots again."""
    source = """
import dataclasses
class Private:
    __slots__ = ("__hidden", "__dict__")
    def __init__(self): self.__hidden, self.extra = 1, 2
    def both(self): return self.__hidden, self.extra
@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    x: int
    y: int = 2
class Below(Frozen): __slots__ = ()
"""
    notebook = {"__name__": "__main__"}
    exec(source, notebook)
    notebook |= {"p": notebook["Private"](), "f": notebook["Frozen"](1), "b": notebook["Below"](3)}
    private, frozen, below = travel(notebook, rank_globals, store, "p", "f", "b")
    assert private.both() == (1, 2)
    assert (frozen.x, frozen.y, below.x) == (1, 2, 3)
    assert not hasattr(below, "__dict__")


def test_code_keeps_its_file_and_lines(store, rank_globals):
    """A cell's function shows its source in another process, whatever cloudpickle does with file names."""
    name, text = (
        "/nowhere/ipykernel_1/2.py",
        "# first\ndef outer():\n    def inner(): return 1\n    return inner\n",
    )
    notebook = {"__name__": "__main__"}
    linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
    exec(compile(text, name, "exec"), notebook)
    data = dumps(notebook["outer"], store, main_globals=notebook).data
    assert serialise(notebook["outer"], store, main_globals=notebook).checksum() == (
        serialise(notebook["outer"], store, main_globals=notebook).checksum()
    )
    del linecache.cache[name]  # as in another process
    outer = loads(data, store, main_globals=rank_globals)
    assert (outer.__code__.co_filename, outer().__code__.co_filename) == (name, name)
    assert inspect.getsource(outer) == text.partition("\n")[2]
    assert inspect.getsource(outer()) == "    def inner(): return 1\n"


def test_submodules_that_a_function_uses_are_imported():
    """`import xml.dom.minidom` binds ``xml``: a function that uses the rest finds it in a new process."""
    assert xml.dom.minidom
    code = """
import sys, xml.dom.minidom
from nbparallel.multiprocessing import Pool
def title(text): return xml.dom.minidom.parseString(text).documentElement.tagName
made = [lambda text, xml=xml: title(text)]
with Pool(1, ) as pool: print(pool.map(title, ["<a/>"]), pool.map(made[0], ["<b/>"]))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.stdout, done.stderr) == ("['a'] ['b']\n", "")


MODULE = """
LATE = MODEL = None
TABLE = {}
def make(value):
    global LATE, MODEL
    LATE, MODEL = value, object()
    return lambda: (LATE, len(TABLE))
def make_other():
    return lambda: MODEL
N = 0
def make_counter():
    def count():
        global N
        N += 1
        return N
    return count
"""


def test_what_a_module_has_set_since_its_import_travels(tmp_path, store, monkeypatch):
    """A closure of an importable module reads the sender's numbers; what else is not set is said."""
    (tmp_path / "late_module.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    module = __import__("late_module")
    data, equal = dumps(module.make(42), store).data, dumps(module.make_other(), store).data
    module.LATE = module.MODEL = None  # as in another process, which imports the module
    closure = loads(data, store)
    assert closure() == (42, 0)
    module.LATE = 42
    assert loads(data, store).__globals__ is vars(module)  # nothing differs: it is the module's own
    with pytest.warns(RuntimeWarning, match="reads MODEL: set by the process that sent it, which it is not"):
        loads(equal, store)
    module.LATE = 7  # as an initializer has it: that counts
    with pytest.warns(RuntimeWarning, match="reads LATE: set by the process that sent it, and is something"):
        assert loads(data, store)() == (7, 0)
    counter = dumps(module.make_counter(), store).data
    assert [loads(counter, store)() for _ in range(3)] == [1, 2, 3]
    del sys.modules["late_module"]


class TwoArgumentsError(Exception):
    """Passes one text on."""

    def __init__(self, a, b):
        super().__init__(f"{a} of {b}")
        self.a = a


class KeywordOnlyError(OSError):
    """Has no positional parameter, and slots."""

    __slots__ = ("kept",)

    def __init__(self, *, code):
        super().__init__(code, "no luck", "file.txt")
        self.kept = code


class Several(ExceptionGroup):
    """A group with a constructor."""

    def __new__(cls, *errors):  # noqa: D102
        return super().__new__(cls, "several", errors)

    def __init__(self, *errors):
        pass


@pytest.mark.filterwarnings("ignore:Implicitly cleaning up:ResourceWarning")  # of the trial, from 3.14 on
def test_exceptions_are_rebuilt_without_their_constructors():
    """Type, text and attributes arrive, whatever the constructor takes; what cannot travel is None."""
    two = load_error(dump_error(TwoArgumentsError(1, 3)))
    assert (type(two), str(two), two.a) == (TwoArgumentsError, "1 of 3", 1)
    keyword = load_error(dump_error(KeywordOnlyError(code=2)))
    assert (str(keyword), keyword.errno, keyword.filename) == ("[Errno 2] no luck: 'file.txt'", 2, "file.txt")
    assert keyword.kept == 2
    group = load_error(dump_error(Several(ValueError(1), KeyError(2))))
    assert (group.message, [str(e) for e in group.exceptions]) == ("several", ["1", "2"])
    with urllib.error.HTTPError("http://x", 404, "gone", {}, io.BytesIO()) as sent:
        found = load_error(dump_error(sent))
    with found:
        assert (found.code, str(found), found.filename) == (404, "HTTP Error 404: gone", "http://x")
    locked = TwoArgumentsError(1, 2)
    locked.lock = types.SimpleNamespace(handle=sys._getframe())
    assert dump_error(locked) is None


TYPES = """
import dataclasses, typing
if typing.TYPE_CHECKING: from nowhere import Missing
@dataclasses.dataclass
class Node:
    value: int
    following: Node | None = None
@dataclasses.dataclass
class Unknown:
    value: Missing
class Pair(typing.NamedTuple):
    left: int
    right: Missing = None
class Plain:
    x: Missing
def annotated(a: Missing, b: int) -> Node: return a
UserId = typing.NewType("UserId", int)
P = typing.ParamSpec("P")
def decorated(f: typing.Callable[P, int]) -> typing.Callable[P, int]: return f
node, unknown, pair = Node(1, Node(2)), Unknown(3), Pair(4)
"""
ALIASES = "type Alias = int | str\ntype Listed[Q] = list[Q]\n" if sys.version_info >= (3, 12) else ""
EAGER = "" if sys.version_info >= (3, 14) else "from __future__ import annotations\n"


def test_annotations_and_types_of_the_notebook(store, rank_globals):
    """What names a type that is missing, by design, travels, and looking at annotations is no change."""
    notebook = {"__name__": "__main__"}
    exec(compile(EAGER + TYPES + ALIASES, "<cell>", "exec", dont_inherit=True), notebook)
    names = ["Node", "Unknown", "Pair", "Plain", "annotated", "decorated", "node", "unknown", "pair"]
    names += ["UserId", "P", *(["Alias", "Listed"] if ALIASES else [])]

    def checksums():
        return {name: serialise(notebook[name], store, main_globals=notebook).checksum() for name in names}

    before = checksums()
    for name in names:
        with contextlib.suppress(NameError, TypeError, AttributeError):
            typing.get_type_hints(notebook[name])
        with contextlib.suppress(NameError, AttributeError):
            assert notebook[name].__annotations__ is not None
    assert checksums() == before
    came = dict(zip(names, travel(notebook, rank_globals, store, *names), strict=True))
    assert (came["node"].following.value, came["unknown"].value, came["pair"].left) == (2, 3, 4)
    assert came["Node"](5).following is None
    assert came["annotated"].__annotations__ == {"a": "Missing", "b": "int", "return": "Node"}
    assert came["Plain"].__annotations__ == {"x": "Missing"}
    assert (came["UserId"](7), came["UserId"].__name__, came["P"].__name__) == (7, "UserId", "P")
    if ALIASES:
        assert came["Alias"].__value__ == int | str
        assert came["Listed"].__type_params__[0].__name__ == "Q"
