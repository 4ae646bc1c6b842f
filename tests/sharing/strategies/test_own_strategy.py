"""The strategy of the how-to page keeps the promises of all: the page says that it may be copied."""

import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import nbparallel as nbp
from nbparallel.testing.strategies import StrategyTests, temporary_registry

pytestmark = pytest.mark.skipif(not os.path.isdir("/proc/self"), reason=f"{sys.platform} has no /proc")
PAGE = Path(__file__).resolve().parent.parent.parent.parent / "docs" / "how-to" / "write-a-strategy.md"


@pytest.fixture(scope="module", autouse=True)
def registered() -> Iterator[None]:
    """Register what the page's first block defines; ranks get it by value, as from a notebook."""
    block = re.search(r"^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert block is not None
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(block[1], str(PAGE), "exec"), names)
    with temporary_registry(names["NamelessFiles"]()):
        yield


class TestNameless(StrategyTests):
    """Files without a name, as a reader of the page would check them."""

    strategy = "nameless"
    dtypes = ("f8", ">i2", [("a", "i1"), ("b", ">c8", 2)])

    @pytest.mark.stress
    @pytest.mark.time_limit(60)
    def test_all_dtypes(
        self, ranks: nbp.Session, names: dict[str, Any], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The same as `test_every_dtype_and_layout` with all dtypes; of `make sweep`, as it takes longest."""
        monkeypatch.setattr(type(self), "dtypes", None)
        self.test_every_dtype_and_layout(ranks, names)
