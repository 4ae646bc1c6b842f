"""The search for private names finds each way to reach one, and takes nothing else for it."""

from __future__ import annotations

import pytest

from tests.architecture.private_names import defined, reached_names

NAMES = frozenset({"_lever", "_wheel"})
REACHES = [
    "client._lever.register(0)",
    "client._lever = None",
    "self._lever",  # the base class's
    "from LIBRARY.channel import _lever",
    "from LIBRARY.channel._crank import Channel",
    "monkeypatch.setattr(client, '_lever', None)",
    "monkeypatch.setattr('LIBRARY.channel._crank', None)",
    "run('x = client._lever')",
    "run(f'x = client._lever({1})')",
    "run('    if client._lever:')",
    "class Own:\n    def _lever(self): ...\nclient._lever()",
]
LEAVES = [
    "class Own:\n    def _lever(self): self._lever()",
    "class Own:\n    def __init__(self):\n        self.x, self._lever = 1, 2\n        self._lever",
    "import select\nselect._lever",
    "from multiprocessing import connection as library\nlibrary.Connection._lever",
    "step._replace(x=1)",
    "view._repr_html_()",
    "other._crank",
    '"""How `client._lever` works."""',
    "_lever = 1\n_lever + 1",
]


@pytest.mark.parametrize("text", REACHES)
def test_each_way_is_found(text: str) -> None:
    """In code and in programs, as an attribute, an import or a name in quotes."""
    assert len(reached_names(text.replace("LIBRARY", "nbparallel"), NAMES)) == 1


@pytest.mark.parametrize("text", LEAVES)
def test_nothing_else_is_found(text: str) -> None:
    """A test's own names and those of other libraries, protocols, prose."""
    assert reached_names(text, NAMES) == []


def test_what_a_text_defines() -> None:
    """Functions, classes, and what is assigned at top level, in a class and on ``self``."""
    text = (
        "_a: int = 1\ndef _b(): _c = 2\nclass _D:\n    _e = 3\n    async def _f(self):\n"
        "        self._g = _h = 4\n        self.x, self._i = 5, 6\n"
        "        other._j = self._k\n        __m__ = 7\n"
    )
    assert defined(text) == {"_a", "_b", "_D", "_e", "_f", "_g", "_i"}
