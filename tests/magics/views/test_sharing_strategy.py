"""`%sharing_strategy`: it shows, switches, and says why one cannot be had."""

from __future__ import annotations

import re
from typing import Any

import pytest

from nbparallel.sharing.strategies.memfd import FileDescriptorStrategy
from nbparallel.sharing.strategies.named_files import FileSystemStrategy, MemoryMapStrategy
from nbparallel.testing.strategies import temporary_registry


@pytest.fixture
def strategies() -> Any:
    """Give the registry back as it was."""
    from nbparallel.sharing.strategies import registry

    with temporary_registry(MemoryMapStrategy()):
        yield registry


def plain(out: Any) -> str:
    """Return the text of the one display of a cell."""
    (display,) = out.outputs
    return str(display.data["text/plain"])


class Mine(FileDescriptorStrategy):
    """Memory of my own.

    And more about it.
    """

    name = "mine"  # type: ignore[assignment]


def test_switching_with_an_option(notebook: Any, strategies: Any, tmp_path: Any) -> None:
    """`%sharing_strategy mmap directory=…` switches and says so in a line; {names} are expanded."""
    assert plain(notebook.run("%sharing_strategy")).startswith("sharing strategy: file_descriptor\n")
    folder = tmp_path / "with blank"
    folder.mkdir()
    notebook.shell.user_ns["folder"] = str(folder)
    text = notebook.run("%sharing_strategy mmap 'directory={folder}'").stdout
    assert text.startswith(f"sharing strategy: mmap (directory={folder} ")
    assert text.endswith(" for new arrays; those that are shared already stay as they are\n")
    assert text.count("\n") == 1
    assert f">current directory={folder} " in notebook.run("%sharing_strategy").outputs[0].data["text/html"]
    assert strategies.find_strategy().directory == str(folder)
    notebook.run("%sharing_strategy mmap 'directory={folder}' allow_network=False")
    assert strategies.choice().options["mmap"] == {"directory": str(folder), "allow_network": False}
    copied = notebook.run("%sharing_strategy copy").stdout
    assert copied.startswith("sharing strategy: copy for new arrays;")
    assert copied.count("\n") == 1
    assert strategies.strategies()["mmap"].directory == str(folder), "options stay for the next time"
    assert notebook.run("%sharing_strategy mmap directory=~").error is None
    strategies.register_sharing_strategy("mine", Mine())
    assert re.search(r"\nmine +yes +Memory of my own\.\n", plain(notebook.run("%sharing_strategy")))


@pytest.mark.usefixtures("strategies")
def test_a_strategy_that_is_missing_here(notebook: Any) -> None:
    """It is listed with the reason, and choosing it is one line that says why not, and what works."""
    with temporary_registry(FileSystemStrategy("/not/there")):
        text = plain(notebook.run("%sharing_strategy"))
        out = notebook.run("%sharing_strategy file_system")
    assert re.search(r"\nfile_system +no: there is no directory /not/there", text)
    assert "'file_system' is not available: there is no directory /not/there here (" in out.stderr
    assert out.stderr.count("\n") == 1
    assert "sharing strategy: file_descriptor" in plain(notebook.run("%sharing_strategy"))
