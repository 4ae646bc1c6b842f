"""Ways to run it where Linux is not: their files do what make does, and loading elsewhere names them."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from IPython.core.error import UsageError
from IPython.core.interactiveshell import InteractiveShell
from traitlets.config import Config

import nbparallel

ROOT = Path(__file__).resolve().parent.parent.parent
PAGE = ROOT / "docs" / "get-started" / "install.md"
WAYS = ("Docker", "devcontainer", "binder", "Colab", "WSL 2")


@pytest.mark.parametrize(
    ("system", "name"), [("darwin", "macOS"), ("win32", "Windows"), ("sunos5", "sunos5")]
)
def test_loading_elsewhere_names_the_ways(monkeypatch: pytest.MonkeyPatch, system: str, name: str) -> None:
    """One sentence with the system and every way, of the class that IPython shows without a traceback."""
    monkeypatch.setattr(sys, "platform", system)
    before = set(sys.modules)
    with pytest.raises(UsageError) as raised:
        nbparallel.load_ipython_extension(None)
    said = str(raised.value)
    assert f"not on {name}: " in said
    assert all(way in said for way in WAYS)
    assert "\n" not in said
    assert ". " not in said
    assert set(sys.modules) - before <= {"IPython.core.error"}, "nothing that needs Linux is imported"
    path = re.search(r"docs/[\w/-]+\.md", said)
    assert path
    assert (ROOT / path[0]).exists()


def test_a_shell_elsewhere_shows_that_line_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`%load_ext nbparallel` prints no traceback."""
    shell: Any = InteractiveShell.__new__(InteractiveShell)
    monkeypatch.setattr(sys, "platform", "darwin")
    try:
        nbparallel.load_ipython_extension(shell)
    except UsageError as error:
        InteractiveShell.show_usage_error(shell, error)
    said = capsys.readouterr().err
    assert said.startswith("UsageError: nbparallel runs on Linux, not on macOS")
    assert len(said.splitlines()) == 1


@pytest.mark.parametrize(("system", "name"), [("darwin", "macOS"), ("win32", "Windows")])
def test_every_name_elsewhere_gives_that_sentence(system: str, name: str) -> None:
    """In a script `import nbparallel` is fine, and every name, module or magic ends in the same words."""
    program = f"""
import importlib, sys
sys.platform = {system!r}
import nbparallel
assert not hasattr(nbparallel, "__wrapped__")
said = []
for use in (lambda: nbparallel.Session, lambda: importlib.import_module("nbparallel.multiprocessing"),
            lambda: __import__("nbparallel", fromlist=["map"]), lambda: nbparallel.sesion):
    try:
        use()
    except ImportError as error:
        said.append(str(error))
sys.platform = "linux"  # IPython has parts for other systems
import IPython
sys.platform = {system!r}
try:
    nbparallel.load_ipython_extension(None)
except Exception as error:
    said.append(str(error))
print(len(said), *set(said), sep="\\n")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines()[:1] == ["5"], done.stdout + done.stderr
    (sentence,) = done.stdout.splitlines()[1:]
    assert sentence.startswith(f"nbparallel runs on Linux, not on {name}: "), done.stderr


@pytest.mark.slow
@pytest.mark.time_limit(600)
def test_setup_works_in_a_fresh_directory(tmp_path: Path) -> None:
    """`make setup` makes an environment with JupyterLab, in which a cell runs on two ranks."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("no git repository: which files a fresh copy has is not known")
    fresh = tmp_path / "fresh"
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).exists():
            (fresh / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, fresh / name)
    clean = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    done = subprocess.run(
        ["make", "setup", f"PYTHON={sys.executable}"],
        cwd=fresh,
        env=clean,
        capture_output=True,
        text=True,
        timeout=540,
    )
    if done.returncode and re.search(
        r"No matching distribution|Failed to establish|Max retries", done.stderr
    ):
        pytest.skip(f"no package index can be reached: {done.stderr.strip().splitlines()[-1]}")
    assert done.returncode == 0, done.stderr[-3000:]
    assert (fresh / ".venv" / "bin" / "jupyter-lab").exists()
    program = (
        "import nbparallel as nbp\nassert nbp.__file__.startswith(%r), nbp.__file__\n"
        "with nbp.Session(2) as s: print(list(s.run('all_reduce(rank)').values))"
    )
    ran = subprocess.run(
        [fresh / ".venv" / "bin" / "python", "-c", program % str(fresh)],
        cwd=tmp_path, env=clean, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert ran.stdout == "[1, 1]\n", ran.stderr


def test_loading_in_xeus_python_says_what_is_missing(capsys: pytest.CaptureFixture[str]) -> None:
    """One line, at once: its kernel does not show all output of ranks."""
    kind = type("XPythonShell", (InteractiveShell,), {"__module__": "xeus_python_shell.shell"})
    shell = kind(config=Config({"HistoryManager": {"enabled": False}}))
    nbparallel.load_ipython_extension(shell)
    try:
        said = capsys.readouterr().out
        assert "xeus-python" in said
        assert "incomplete" in said
    finally:
        nbparallel.unload_ipython_extension(shell)
