"""What a rank changed inside of the notebook's object, and what finding changes costs in the notebook."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from nbparallel.session.names import cell_inputs
from tests.session.names.pair import Pair

LOST = "the notebook has changed it, and what this rank changed in it is lost"


@pytest.fixture
def pair() -> Iterator[Pair]:
    """Return a notebook and a rank."""
    pair = Pair()
    with pair.on_rank():
        pass
    yield pair
    pair.close()


@pytest.mark.parametrize(
    ("make", "change"),
    [
        ("d = {'a': 1}", "d['x'] = 1"),
        ("d = {'a': [1]}", "d['a'].append(2)"),
        ("d = [3, 1, 2]", "d.sort()"),
        ("d = {1, 2}", "d.add(3)"),
        ("d = np.ma.zeros(100_000)", "d[77_777] = 1"),
        ("d = [np.zeros(100_000)]", "d[0][77_777] = 1"),
        ("class C: pass\nd = C()", "d.new = 1"),
        ("d = np.random.default_rng(1)", "d.random()"),
    ],
)
def test_a_change_in_place_is_not_lost_without_a_word(pair: Pair, make: str, change: str) -> None:
    """One line, when the notebook's object has changed and replaces it; then the rank has the notebook's."""
    pair.type(f"import numpy as np\n{make}")
    pair.run("repr(d)")
    pair.run(f"{change}\n1")
    pair.run("repr(d)")
    assert pair.notes == ()
    pair.type("d = (d, 0)")
    pair.run("repr(d)")
    assert pair.notes == (f"d was replaced: {LOST}",)
    pair.type("d = (d, 1)")
    pair.run("repr(d)")
    assert pair.notes == ()


@pytest.mark.parametrize(
    "make",
    [
        "d = {'a': [1, 2.0, 'text', b'bytes', None, (1, 2)], 'b': {1, 'x'}}",
        "d = [np.zeros(100_000), np.ma.zeros(3), np.zeros(3, object)]",
        "class C:\n    def __init__(self): self.a = [1]\nd = [C(), C()]",
        "d = np.random.default_rng(1)",
        "import fractions, datetime\nd = [fractions.Fraction(1, 3), datetime.date.today()]",
    ],
)
def test_what_was_only_read_is_replaced_silently(pair: Pair, make: str) -> None:
    """Reading, and the notebook's own change, are no change of the rank's."""
    pair.type(f"import numpy as np\n{make}")
    for turn in range(3):
        pair.run("repr(d), hash(str(d)), [d] * 2")
        assert pair.notes == ()
        pair.type(f"d = (d, {turn})")


def test_deletion_and_assignment(pair: Pair) -> None:
    """A deleted name is removed with a line if the rank had changed the object; what it assigned stays."""
    pair.type("d = [1]; e = [1]; f = [1]")
    pair.run("d, e, f")
    pair.run("d.append(2)\ne = ['mine']")
    pair.type("del d, e, f")
    pair.run("1")
    lost = "the notebook has deleted it, and what this rank changed in it is lost"
    assert pair.notes == (f"d was removed: {lost}",)
    assert pair.rank["e"] == ["mine"]
    pair.type("e = [2]")
    pair.run("e")
    assert pair.notes == ("e was replaced: the notebook has changed it since this rank assigned it",)


def test_a_name_that_takes_long_to_check_says_so_once(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the cell in which it had not changed; what is small, or travels, says nothing."""
    monkeypatch.setattr(cell_inputs, "COSTLY_SECONDS", 0.0)
    pair.type("words = ['a'] * 10; n = 5; more = ['b']")
    pair.run("len(words), n")
    assert pair.notes == ()
    pair.run("len(words), n, more")
    (note,) = pair.notes
    assert note.startswith("finding out whether words has changed takes 0.0 s in each cell that uses it: ")
    pair.run("len(words), n")
    assert pair.notes == ()
