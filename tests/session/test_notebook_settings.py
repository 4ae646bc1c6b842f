"""Settings of the notebook: ranks follow them with the next cell, and keep what cells there have set."""

from __future__ import annotations

import decimal
import importlib
import logging
import os
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import matplotlib
import numpy as np
import pandas as pd
import pytest

from nbparallel.engine.environment import FollowedSettings
from nbparallel.session import Session
from nbparallel.session.names.notebook_settings import NotebookSettings
from nbparallel.session.output import LineSink


class OwnWarning(UserWarning):
    """A category that ranks do not have."""


@pytest.fixture(autouse=True)
def settings_as_before() -> Iterator[None]:
    """Put back what the tests set."""
    handlers, level = logging.root.handlers[:], logging.root.level
    with (
        np.errstate(), np.printoptions(), decimal.localcontext(), matplotlib.rc_context(),
        pd.option_context("display.max_rows", 60, "display.float_format", None), warnings.catch_warnings(),
    ):  # fmt: skip
        yield
    logging.root.handlers[:] = handlers
    logging.root.setLevel(level)
    logging.getLogger("nbp-test").setLevel(logging.NOTSET)


def printed(session: Session, cell: str, capsys: pytest.CaptureFixture[str]) -> str:
    """Return what both ranks print to stderr."""
    session.run(cell, sink=LineSink())
    return capsys.readouterr().err


def test_logging_on_ranks_is_the_notebooks(two_ranks: Session, capsys: pytest.CaptureFixture[str]) -> None:
    """Level, format and stream of `basicConfig` hold on ranks, and in a map; levels of loggers too."""
    log = "import logging; logging.getLogger('nbp-test').info('it is %d', 1)"
    assert "it is" not in printed(two_ranks, log, capsys)
    logging.basicConfig(level=logging.INFO, format="<%(levelname)s %(message)s>", force=True)
    assert printed(two_ranks, log, capsys).count("<INFO it is 1>") == 2
    two_ranks.map(lambda item: logging.getLogger("nbp-test").info("item %d", item), range(2))
    assert "<INFO item 1>" in capsys.readouterr().err
    logging.getLogger("nbp-test").setLevel(logging.ERROR)
    assert "it is" not in printed(two_ranks, log, capsys)


def test_a_handler_that_a_cell_has_made_is_not_doubled(
    two_ranks: Session, capsys: pytest.CaptureFixture[str]
) -> None:
    """A cell that configures logging as the notebook does has each line once."""
    configure = "logging.basicConfig(level=logging.INFO, format='<%(message)s>', force=True)"
    two_ranks.run(f"import logging; {configure}")
    exec(configure)
    assert printed(two_ranks, "logging.info('once')", capsys).count("<once>") == 2


@pytest.mark.parametrize("first", [False, True])
def test_a_cell_configures_logging_as_it_likes(
    two_ranks: Session, capsys: pytest.CaptureFixture[str], first: bool
) -> None:
    """`basicConfig` on ranks holds whether the notebook has called it before or does so later."""
    own = "import logging, sys; logging.basicConfig(level=10, format='own <%(message)s>', stream=sys.stdout)"
    logging.basicConfig(level=logging.INFO, format="<%(message)s>", force=True)
    if first:
        logging.root.handlers.clear()
        two_ranks.run(own)
        logging.basicConfig(level=logging.INFO, format="<%(message)s>", force=True)
        two_ranks.run("logging.warning('once')", sink=LineSink())
    else:
        two_ranks.run("pass")
        two_ranks.run(f"{own}; logging.debug('once')", sink=LineSink())
    text = "".join(capsys.readouterr())
    assert text.count("own <once>") == 2
    assert text.count("<once>") == 2


def test_options_of_libraries_are_the_notebooks(two_ranks: Session) -> None:
    """numpy's, decimal's, pandas' and matplotlib's settings hold from the next statement on."""
    two_ranks.run("pass")
    np.seterr(divide="raise")
    np.set_printoptions(precision=2)
    decimal.getcontext().prec = 5
    pd.set_option("display.max_rows", 4)
    pd.set_option("display.float_format", lambda x: f"<{x:.1f}>")
    matplotlib.rcParams["figure.figsize"] = (2, 1)
    result = two_ranks.run(
        "import decimal, matplotlib, numpy as np, pandas as pd\n"
        "(np.geterr()['divide'], str(np.array([1.2345])), str(decimal.Decimal(1) / 3),\n"
        " pd.get_option('display.max_rows'), '<1.2>' in repr(pd.Series([1.23])),\n"
        " tuple(matplotlib.rcParams['figure.figsize']))"
    )
    assert result.values == [("raise", "[1.23]", "0.33333", 4, True, (2, 1))] * 2


def test_a_list_that_is_changed_in_place_is_seen() -> None:
    """An entry of rcParams may be a list."""
    settings = NotebookSettings()
    before = settings.current()
    fonts = matplotlib.rcParams["font.sans-serif"]
    fonts.insert(0, "Own")
    try:
        assert settings.current() != before
    finally:
        fonts.remove("Own")


@pytest.mark.slow
def test_default_dtype_of_torch_is_the_notebooks(two_ranks: Session) -> None:
    """`torch.set_default_dtype` holds on ranks, too."""
    torch = pytest.importorskip("torch")
    torch.set_default_dtype(torch.float64)
    try:
        assert two_ranks.run("import torch\nstr(torch.zeros(1).dtype)").values == ["torch.float64"] * 2
    finally:
        torch.set_default_dtype(torch.float32)


def test_filters_of_warnings_are_the_notebooks(
    two_ranks: Session, capsys: pytest.CaptureFixture[str]
) -> None:
    """What the notebook ignores is ignored on ranks; a filter for a class that they lack hinders nothing."""
    warnings.simplefilter("always")
    warnings.filterwarnings("ignore", message="foo")
    warnings.filterwarnings("error", category=OwnWarning)
    text = printed(two_ranks, "import warnings; warnings.warn('foo'); warnings.warn('bar')", capsys)
    assert "foo" not in text.replace("warn('foo')", "")
    assert text.count("UserWarning: bar") == 2
    warnings.filterwarnings("error", message="bar")
    caught = "try:\n    warnings.warn('bar')\nexcept UserWarning:\n    caught = True\ncaught"
    assert two_ranks.run(caught).values == [True, True]


PLOTLY = """
from types import SimpleNamespace
renderers, templates = SimpleNamespace(default="heavy"), SimpleNamespace(default="plotly")
"""


def test_plotlys_renderer_is_the_notebooks(
    two_ranks: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a rank it finds no front end, and would write all of its script with each figure."""
    (tmp_path / "plotly").mkdir()
    (tmp_path / "plotly" / "__init__.py").touch()
    (tmp_path / "plotly" / "io.py").write_text(PLOTLY)
    monkeypatch.syspath_prepend(tmp_path)
    importlib.import_module("plotly.io").renderers.default = "light"
    try:
        seen = "import plotly.io\n(plotly.io.renderers.default, plotly.io.templates.default)"
        assert two_ranks.run(seen).values == [("light", "plotly")] * 2
    finally:
        sys.modules.pop("plotly.io")
        sys.modules.pop("plotly")


def test_a_rank_keeps_what_its_cells_set(two_ranks: Session) -> None:
    """A setting of a cell stays until the notebook changes the same one."""
    two_ranks.run("import numpy as np, os; np.seterr(divide='raise'); os.environ['NBP_OWN'] = '1'")
    np.set_printoptions(precision=3)
    seen = "(np.geterr()['divide'], os.environ.get('NBP_OWN'), np.get_printoptions()['precision'])"
    assert two_ranks.run(seen).values == [("raise", "1", 3)] * 2
    np.seterr(divide="ignore")
    assert two_ranks.run(seen).values == [("ignore", "1", 3)] * 2


def test_a_rank_keeps_what_the_statement_set_that_loads_the_library(two_ranks: Session) -> None:
    """The notebook's options hold right behind the import, before a cell's own."""
    pd.set_option("display.max_columns", 3)
    cell = (
        "def setup():\n"
        "    import pandas as pd\n"
        "    before = pd.get_option('display.max_columns')\n"
        "    pd.set_option('display.max_columns', 7)\n"
        "    return before\n"
        "setup()"
    )
    try:
        assert two_ranks.run(cell).values == [3, 3]
        assert two_ranks.run("import pandas as pd\npd.get_option('display.max_columns')").values == [7, 7]
    finally:
        pd.reset_option("display.max_columns")


@pytest.mark.slow
def test_a_rank_keeps_the_dtype_that_its_cell_set(two_ranks: Session) -> None:
    """Also if a function of the cell loads torch."""
    pytest.importorskip("torch")
    cell = "def setup():\n    import torch\n    torch.set_default_dtype(torch.float64)\nsetup()"
    two_ranks.run(cell)
    assert two_ranks.run("import torch\nstr(torch.zeros(1).dtype)").values == ["torch.float64"] * 2


def test_a_library_that_the_notebook_loads_later_has_its_defaults() -> None:
    """What ranks have set of it before stays, where the notebook has the default."""
    settings = [
        each for each in NotebookSettings().current() if each[0] in ("pandas", "matplotlib", "decimal")
    ]
    assert len(settings) == 3
    pd.set_option("display.max_rows", 7)
    matplotlib.rcParams["lines.linewidth"] = 9
    decimal.getcontext().prec = 5
    FollowedSettings().follow(settings)
    assert pd.get_option("display.max_rows") == 7
    assert matplotlib.rcParams["lines.linewidth"] == 9
    assert decimal.getcontext().prec == 5


def test_environment_follows_but_for_the_ranks_own(
    two_ranks: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Variables that are set, changed or deleted later go; what says which rank it is does not."""
    two_ranks.run("import os")
    monkeypatch.setenv("NBP_LATER", "1")
    monkeypatch.setenv("RANK", "7")
    seen = "(os.environ.get('NBP_LATER'), os.environ['RANK'])"
    assert two_ranks.run(seen).values == [("1", "0"), ("1", "1")]
    monkeypatch.delenv("NBP_LATER")
    assert two_ranks.run(seen).values == [(None, "0"), (None, "1")]


def test_a_queued_cell_has_the_settings_of_its_thread(two_ranks: Session) -> None:
    """Numpy and decimal keep settings for each thread: a queued cell has those of the one that queued it."""
    np.seterr(divide="raise")
    decimal.getcontext().prec = 7
    first = two_ranks.submit("import time; time.sleep(0.2)")
    second = two_ranks.submit(
        "import decimal, numpy as np; (np.geterr()['divide'], decimal.getcontext().prec)", queue=True
    )
    first.result()
    # numpy 1 keeps them for each thread by itself, where no other one can look
    divide = "raise" if np.__version__ >= "2" else "warn"
    assert second.result().values == [(divide, 7)] * 2


def test_what_cannot_travel_is_left_out(two_ranks: Session, capsys: pytest.CaptureFixture[str]) -> None:
    """An option that cannot be pickled stays here; the others go."""
    with open(os.devnull) as file:
        pd.set_option("display.float_format", lambda x, file=file: str(x))
        pd.set_option("display.max_rows", 4)
        assert two_ranks.run("import pandas as pd\npd.get_option('display.max_rows')").values == [4, 4]
        pd.set_option("display.float_format", None)


def test_a_notebook_without_a_library_loads_none(two_ranks: Session) -> None:
    """Following costs no import."""
    loaded = two_ranks.run("import sys; 'pandas' in sys.modules").values
    assert "pandas" in sys.modules
    assert loaded == [False, False]
