"""Functions, classes and modules by name: they bring what they use, and are sent once."""

import gc

import pytest

from nbparallel.errors import (
    UnpicklableError,
)
from nbparallel.wire.name_updates import NameKind, NameUpdate


def test_functions_bring_what_they_use(pair):
    """The names that functions use come along, transitively, and are looked up on the rank."""
    pair.type("k = 5\ndef f(n): return g(n) + k\ndef g(n): return 1 if n == 0 else n * g(n - 1) * rank")
    assert pair.run("f(1)") == 8
    assert set(pair.sent()) == {"f", "g", "k"}
    pair.type("k = 6")
    assert pair.run("f(1)") == 9
    assert pair.sent() == ["k"]
    pair.type("def g(n): return 0")
    assert pair.run("f(1)") == 6
    assert pair.run("k = 100\nf(1)") == 100


def test_names_in_strings_come_along(pair):
    """Those that `eval`, or pandas' `query` by its ``@name``, looks up, in a cell and in a function."""
    pair.type("k = 5\nclass Frame:\n    def query(self, text): return eval(text.partition('@')[2])")
    pair.type("limit = 7\ndef f(frame): return frame.query('a > @limit') + eval('k + 1')")
    assert pair.run("eval('k + 1')") == 6
    assert pair.run("f(Frame())") == 13
    assert "limit" in pair.sent()
    pair.type("other = 3")
    assert pair.run("len('me@other')") == 8
    assert "other" not in pair.sent()


def test_instances_belong_to_the_ranks_class(pair):
    """Instances, early and late, are instances of the rank's one class, whose methods see the rank."""
    pair.type(
        "off = 1\nclass A:\n    n = 0\n    def f(self): return rank + off\nclass B(A): pass\na = A(); b = B()"
    )
    assert pair.run("a.f(), type(a).__name__") == (4, "A")
    pair.rank["first"] = pair.rank["a"]
    assert pair.run("type(first) is A and type(b) is B and isinstance(b, A) and b.f()") == 4
    pair.type("a = A(); a.extra = B")
    assert pair.run("type(a) is A is type(first) and a.extra is B")
    assert pair.sent() == ["a"]


def test_class_is_not_reset_by_its_instances(pair):
    """What a rank changed in a class stays when an instance comes; a change in the notebook replaces it."""
    pair.type("class A: n = 0\na = A()")
    pair.run("A.n = 50\na")
    pair.type("a = A()")
    assert pair.run("a.n") == 50
    pair.type("A.n = 7")
    assert pair.run("a.n") == 7
    pair.type("class A: n = 8")
    assert pair.run("A.n, a.n") == (8, 7)


def test_class_and_function_are_sent_once(pair):
    """Unchanged definitions do not travel again, also after an instance was pickled and used."""
    pair.type("class A:\n    x: int = 1\n    def f(self): return g()\ndef g(): return 2\na = A()")
    pair.run("a.f(), A.f, g")
    pair.type("a.f(); A.__annotations__; import copy; copy.copy(a)")
    pair.run("a.f(), A.f, g")
    assert pair.sent() == []


def test_class_outlives_its_instances(pair):
    """An instance that comes after all others have died still finds its class."""
    pair.type("class A: pass\na = A()")
    pair.run("a")
    pair.run("a = None")
    gc.collect()
    pair.type("b = A()")
    assert pair.run("type(b).__name__") == "A"


def test_modules_come_by_name(pair):
    """Modules, and the submodules that the cell mentions, are imported; nothing travels twice."""
    pair.type("import os.path as p, xml, xml.dom.minidom, json")
    assert pair.run("p.join('a', 'b'), json.dumps(1), xml.dom.minidom.Node.__name__") == ("a/b", "1", "Node")
    update = next(u for u in pair.preparation.updates[0] if u.name == "xml")
    assert update.modules == ("xml", "xml.dom", "xml.dom.minidom")
    pair.run("xml, json")
    assert pair.sent() == []


def test_module_that_cannot_be_imported(pair):
    """A module that the rank does not have is one clear error with the variable and the module."""
    update = NameUpdate("m", NameKind.MODULE, modules=("no_such_module",))
    with pytest.raises(UnpicklableError, match=r"'m' is the module 'no_such_module'.*ModuleNotFoundError"):
        pair.rank_names.apply([update])
