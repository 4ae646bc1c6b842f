"""How a variable looks: class, shape or length, and never a line of the user's own code."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from nbparallel.sharing.store import Store
from nbparallel.transfer.variable_info import describe_variable


@pytest.fixture
def store():
    """Make a store of one process."""
    made = Store()
    yield made
    made.close()


class Evil:
    """Everything that is asked of it ends the process, or tries."""

    __module__ = "__main__"

    @property
    def __class__(self) -> Any:
        """Fail."""
        raise SystemExit("__class__")

    @property
    def shape(self) -> Any:
        """Fail."""
        raise SystemExit("shape")

    def __len__(self) -> int:
        raise SystemExit("len")

    def __getattribute__(self, name: str) -> Any:
        raise SystemExit(f"getattribute {name}")

    def __eq__(self, other: object) -> bool:
        raise SystemExit("eq")

    __hash__ = None  # type: ignore[assignment]


class EvilLibrary(Evil):
    """The same, installed: its shape is asked for, and what comes of it is nobody's problem."""

    __module__ = "numpy.evil"


class EvilMeta(type):
    """A class of classes that lies."""

    def __getattribute__(cls, name: str) -> Any:
        raise SystemExit(name)


class EvilArray(np.ndarray):
    """An array that lies about itself."""

    @property
    def shape(self) -> Any:
        """Fail."""
        raise SystemExit("shape")

    @property
    def dtype(self) -> Any:
        """Fail."""
        raise SystemExit("dtype")

    def view(self, *args: Any) -> Any:
        """Fail."""
        raise SystemExit("view")


class Shaped:
    """An object with an attribute as libraries have it."""

    __module__ = "library"

    def __init__(self, shape: Any) -> None:
        self._shape = shape

    @property
    def shape(self) -> Any:
        """Return it."""
        return self._shape


class Attribute:
    """A notebook's class: what lies there is looked at, nothing is run."""

    __module__ = "__main__"

    def __init__(self, shape: Any) -> None:
        self.shape = shape


@pytest.mark.parametrize(
    ("value", "looks"),
    [
        (np.zeros((3, 4)), "ndarray (3, 4) float64"),
        (np.zeros(()), "ndarray () float64"),
        (np.ma.zeros(2), "MaskedArray (2,) float64"),
        (np.zeros(2, [(f"field_{n}", "i4") for n in range(9)]), "ndarray (2,) 9 fields"),
        (np.float64(1), "float64"),
        (3, "int"),
        (None, "None"),
        ("four", "str of 4"),
        ([1] * 1000, "list of 1,000"),
        ({}, "dict of 0"),
        (len, "function"),
        (lambda: 0, "function"),
        (dict, "class"),
        (Shaped, "class"),
        (Shaped((2, 3)), "Shaped (2, 3)"),
        (Shaped([2, 3]), "Shaped"),
        (Shaped((2, "x")), "Shaped"),
        (Shaped((2,) * 100), "Shaped"),
        (Attribute((5,)), "Attribute (5,)"),
        (Attribute(np.zeros(3)), "Attribute"),
        (Attribute(object.__new__(Evil)), "Attribute"),
        (np.zeros(3).view(EvilArray), "EvilArray (3,) float64"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_looks(store: Store, value: Any, looks: str) -> None:
    """Class and shape, or length, in a few words; hostile objects are named and left alone."""
    assert describe_variable("x", value, store).looks == looks


@pytest.mark.parametrize("cls", [Evil, EvilLibrary], ids=["notebook", "library"])
def test_hostile_objects_do_no_harm(store: Store, cls: type) -> None:
    """An object that ends whoever asks it anything is named, and nothing else happens."""
    assert describe_variable("x", object.__new__(cls), store).looks in ("Evil", "EvilLibrary")


def test_the_notebooks_own_properties_are_not_run(store: Store) -> None:
    """What a user computes in a property may take an hour; an installed library is asked, and may derive."""
    ran = []

    def shape(self: object) -> tuple[int, ...]:
        ran.append(type(self).__name__)
        return (1, 2)

    library = type("Library", (), {"shape": property(shape), "__module__": "library"})
    mine = type("Mine", (library,), {"__module__": "__main__"})
    assert describe_variable("x", library(), store).looks == "Library (1, 2)"
    assert describe_variable("x", mine(), store).looks == "Mine"
    assert ran == ["Library"]


def test_an_odd_metaclass_does_no_harm(store: Store) -> None:
    """A class that answers every question with its own code is named all the same, and not asked."""
    shape = property(lambda self: (1,))
    for module, looks in (("__main__", "Odd"), ("library", "Odd (1,)")):
        odd = EvilMeta("Odd", (), {"shape": shape, "__module__": module})
        assert describe_variable("x", object.__new__(odd), store).looks == looks
        assert describe_variable("x", odd, store).looks == "class"


def test_where_an_array_lies(store: Store) -> None:
    """Segment and extent tell what is part of what; a private array has none."""
    x = store.share(np.arange(100.0).reshape(10, 10), strategy="file_descriptor", for_all=True)
    whole, part = describe_variable("x", x, store), describe_variable("part", x[2:4], store)
    assert whole.segment == part.segment != 0
    assert (part.start - whole.start, part.stop - part.start) == (160, 160)
    assert describe_variable("p", x * 2, store).segment == 0
    assert describe_variable("e", x.view(EvilArray), store).segment == whole.segment
