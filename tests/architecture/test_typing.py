"""The types that users see: a program of theirs passes the strict checker, and wrong ones do not."""

from __future__ import annotations

import ast
import importlib.util
import json
import multiprocessing
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

import nbparallel
import nbparallel.distributed as dist
from nbparallel import errors
from nbparallel.distributed.communicator import OPERATIONS

ROOT = Path(__file__).resolve().parent.parent.parent
PROGRAM = Path(__file__).with_name("user_program.py")
MODULES = [name for name in dir(nbparallel) if isinstance(getattr(nbparallel, name), ModuleType)]
"""What users import; what stands in other modules is public where one of these has its name."""
COMPLETE = 0.97
"""Of public names, the part whose types are written down: other checkers infer others, or none."""
WRONG = """import nbparallel as nbp
with nbp.Session(2) as session:
    session.run('1').valeus
    size: str = len(session.run('1').values)
nbp.is_shared(1).real.foo
import nbparallel.distributed as dist
dist.all_reduse(1)
text: str = dist.all_reduce(3)
import nbparallel.multiprocessing as mp
mp.Quueue()
mp.Queue(size="1")
mp.get_context("spawn").Proces
nbp.Sesion(2)
nbp.RankDiedError("").rang
nbp.session.Sesion
"""
WRONG_LINES = [3, 4, 5, 7, 8, 10, 11, 12, 13, 14, 15]
TENSORS = """import torch
from typing import assert_type
import nbparallel.distributed as dist
def tensors(x: torch.Tensor) -> None:
    assert_type(dist.all_reduce(x), torch.Tensor)
    assert_type(dist.all_gather(x), list[torch.Tensor])
    assert_type(dist.shard(x), torch.Tensor)
"""

Check = Callable[[Path], list[tuple[int, str]]]


def run(module: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a checker in the clone."""
    if importlib.util.find_spec(module) is None:
        pytest.skip(f"{module} is not installed: `make dist` installs it")
    command = [sys.executable, "-m", module, *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)


def mypy(program: Path) -> list[tuple[int, str]]:
    """Return lines and texts of mypy's errors, with settings and cache of `make lint`."""
    done = run(
        "mypy", "--config-file", "pyproject.toml", "--no-error-summary", "--output", "json", str(program)
    )
    assert done.returncode in (0, 1), done.stderr
    return [(one["line"], one["message"]) for one in map(json.loads, done.stdout.splitlines())]


def pyright(program: Path) -> list[tuple[int, str]]:
    """Return lines and texts of pyright's errors."""
    done = run("pyright", "--pythonpath", sys.executable, "--outputjson", str(program))
    assert done.returncode in (0, 1), done.stdout + done.stderr
    found = json.loads(done.stdout)["generalDiagnostics"]
    errors = [one for one in found if one["severity"] == "error"]
    return [(one["range"]["start"]["line"] + 1, one["message"]) for one in errors]


@pytest.mark.slow
@pytest.mark.time_limit(300)
@pytest.mark.parametrize("check", [mypy, pyright])
def test_a_user_s_program_has_the_types_it_asserts(check: Check, tmp_path: Path) -> None:
    """`user_program.py` passes both checkers; a wrong name, argument or type is an error in its line."""
    assert check(PROGRAM) == []
    wrong = tmp_path / "wrong.py"
    wrong.write_text(WRONG)
    assert sorted({line for line, _ in check(wrong)}) == WRONG_LINES


@pytest.mark.slow
@pytest.mark.time_limit(300)
def test_a_tensor_stays_one(tmp_path: Path) -> None:
    """Operations return `torch.Tensor` for it, not what an array would give."""
    if importlib.util.find_spec("torch") is None:
        pytest.skip("torch is not installed: `make torch` installs it")
    program = tmp_path / "tensors.py"
    program.write_text(TENSORS)
    assert pyright(program) == []


def public_names() -> Iterator[str]:
    """Yield the public names, also under the names of the modules that define them."""
    for module in [nbparallel, *(getattr(nbparallel, name) for name in MODULES)]:
        for name in getattr(module, "__all__", None) or dir(module):
            found = getattr(module, name, None)
            if name.startswith("_") or isinstance(found, ModuleType):
                continue
            yield f"{module.__name__}.{name}"
            for one in found.__mro__ if isinstance(found, type) else [found]:
                if str(getattr(one, "__module__", "")).startswith("nbparallel."):
                    yield f"{one.__module__}.{getattr(one, '__qualname__', name)}"


@pytest.mark.slow
@pytest.mark.time_limit(300)
def test_types_of_public_names_are_complete() -> None:
    """`pyright --verifytypes` knows them without a guess."""
    done = run("pyright", "--pythonpath", sys.executable, "--verifytypes", "nbparallel", "--ignoreexternal",
               "--outputjson")  # fmt: skip
    symbols = json.loads(done.stdout)["typeCompleteness"]["symbols"]
    public = set(public_names())
    known = {}
    for symbol in symbols:
        parts = symbol["name"].split(".")
        if public.intersection(".".join(parts[:end]) for end in range(2, len(parts) + 1)):
            known[symbol["name"]] = symbol["isTypeKnown"] and not symbol["isTypeAmbiguous"]
    assert len(known) > 700
    unknown = sorted(name for name, is_known in known.items() if not is_known)
    assert len(unknown) <= (1 - COMPLETE) * len(known), "\n".join(unknown)


def test_what_loads_on_demand_is_known_to_type_checkers() -> None:
    """Errors, modules and the library's names stand in the packages for checkers."""
    for package, names in (
        (nbparallel, {*MODULES, *(n for n in vars(errors) if n.endswith("Error"))}),
        (nbparallel.multiprocessing, set(multiprocessing.__all__)),
    ):
        tree = ast.parse(Path(package.__file__ or "").read_text())
        typed = {
            name
            for block in tree.body
            if isinstance(block, ast.If) and "TYPE_CHECKING" in ast.unparse(block.test)
            for node in ast.walk(block)
            if isinstance(node, ast.ImportFrom)
            for name in (
                [a.asname for a in node.names]
                if node.names[0].name != "*"
                else (vars(errors) if node.module == "nbparallel.errors" else multiprocessing.__all__)
            )
        }
        assert names - typed == set()


def test_every_operation_is_known_to_type_checkers() -> None:
    """What `nbparallel.distributed` makes from its list stands there for checkers, and no more."""
    tree = ast.parse(Path(dist.__file__).read_text())
    (block,) = (
        node.body
        for node in tree.body
        if isinstance(node, ast.If) and "_typed = current()" in ast.unparse(node)
    )
    typed = [node.target.id for node in block if isinstance(node, ast.AnnAssign)]
    defined = [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
    assert sorted([*typed, *(name for name in OPERATIONS if name in defined)]) == sorted(OPERATIONS)
