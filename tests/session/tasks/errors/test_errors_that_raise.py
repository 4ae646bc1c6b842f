"""Errors whose own methods raise: a rank reports class and line, and keeps its variables."""

from __future__ import annotations

import pytest

from nbparallel.errors import ParallelError
from nbparallel.session import Session

RAISES = "raise RuntimeError('no')"
ERROR = "class Odd(Exception):\n    {}\nraise Odd('text')"
PROGRAMS = {
    "repr of an argument": f"class B:\n    def __repr__(self): {RAISES}\nraise ValueError(B())",
    "SystemExit of an argument": "class B:\n    def __repr__(self): raise SystemExit\nraise ValueError(B())",
    "str": ERROR.format(f"def __str__(self): {RAISES}"),
    "str is None": "class Odd(ValueError):\n    def __str__(self): return None\nraise Odd('text')",
    "str interrupts": ERROR.format("def __str__(self): raise KeyboardInterrupt"),
    "delegates": ERROR.format("data = {}\n    def __getattr__(self, name): return self.data[name]"),
    "deep list": "x = []\nfor _ in range(1000): x = [x]\nraise ValueError(x)",
    "deep groups": "e = ValueError(1)\nfor _ in range(500): e = ExceptionGroup('g', [e])\nraise e",
    "wide groups": "g = ValueError(1)\nfor _ in range(22): g = ExceptionGroup('g', [g, g])\nraise g",
    "code": "class E(SystemExit):\n    code = property(lambda self: 1 / 0)\nraise E",
    "setstate": ERROR.format(
        "x = 1\n    def __init__(self, *a): self.y = 1\n"
        "    def __setstate__(self, state): raise KeyboardInterrupt"
    ),
    "class": ERROR.format(f"@property\n    def __class__(self): {RAISES}"),
    "cause": ERROR.format(f"@property\n    def __cause__(self): {RAISES}"),
    "reduce": ERROR.format("def __reduce_ex__(self, protocol): raise KeyboardInterrupt"),
    "everything": ERROR.format("def __getattribute__(self, name): raise SystemExit"),
    "false": ERROR.format("def __bool__(self): raise KeyboardInterrupt"),
    "metaclass": "class M(type):\n    def __getattribute__(cls, name): raise KeyboardInterrupt\n"
    "class Odd(Exception, metaclass=M): pass\nraise Odd('text')",
    "in an operation": "class Odd(Exception):\n    def __str__(self): raise KeyboardInterrupt\n"
    "class B:\n    def __reduce_ex__(self, protocol): raise Odd\nall_gather(B())",
}


@pytest.fixture(scope="module")
def session() -> Session:
    """Two ranks for all tests."""
    with Session(2) as session:
        session.run("pass")  # the first epoch's control segment is there before the first leak check
        yield session


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_rank_survives_what_an_error_raises_when_it_is_asked(session: Session, name: str) -> None:
    """The error has its class's name and its line, and the ranks' variables are there."""
    session.push(kept=name)
    with pytest.raises(ParallelError) as caught:
        session.run(PROGRAMS[name])
    last = PROGRAMS[name].count("\n") + 1
    special = {"deep groups": "ExceptionGroup", "wide groups": "ExceptionGroup", "code": "E"}
    expected = {"repr": "ValueError", "Syst": "ValueError", "deep": "ValueError"}.get(name[:4], "Odd")
    for failure in caught.value.failures.values():
        if name != "in an operation":  # there it is an error of the operation
            assert failure.ename == special.get(name, expected)
            assert failure.line == last
    assert list(session.pull("kept")) == [name, name]


def test_a_value_that_raises_costs_its_value_only(session: Session) -> None:
    """A result that raises KeyboardInterrupt when it is pickled stays on its rank."""
    session.run("class V:\n    def __reduce_ex__(self, protocol): raise KeyboardInterrupt\nkept = V()")
    with pytest.raises(Exception, match="KeyboardInterrupt"):
        session.pull("kept")
    assert session.run("type(kept).__name__").values == ["V", "V"]
    session.run("class Q:\n    @property\n    def __class__(self): raise SystemExit\nkept = Q()")
    session.who()
    assert session.run("1").values == [1, 1]
