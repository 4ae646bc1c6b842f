"""The types that users see: a program of theirs passes the strict checker, and wrong ones do not."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import nbparallel.distributed as dist
from nbparallel.distributed.communicator import OPERATIONS

ROOT = Path(__file__).resolve().parent.parent.parent
PROGRAM = Path(__file__).with_name("user_program.py")


def check(program: Path) -> subprocess.CompletedProcess[str]:
    """Run the checker over one program with the project's settings (and its cache, as `make lint`)."""
    command = [sys.executable, "-m", "mypy", "--config-file", "pyproject.toml", "--no-error-summary"]
    return subprocess.run([*command, str(program)], cwd=ROOT, capture_output=True, text=True, timeout=300)


@pytest.mark.slow
def test_a_user_s_program_has_the_types_it_asserts(tmp_path: Path) -> None:
    """`user_program.py` passes mypy's strict mode; a wrong attribute, type or operation is an error."""
    done = check(PROGRAM)
    assert done.returncode == 0, done.stdout + done.stderr
    wrong = tmp_path / "wrong.py"
    wrong.write_text(
        "import nbparallel as nbp\n"
        "with nbp.Session(2) as session:\n"
        "    session.run('1').valeus\n"
        "    size: str = len(session.run('1').values)\n"
        "nbp.is_shared(1).real.foo\n"
        "import nbparallel.distributed as dist\n"
        "dist.all_reduse(1)\n"
    )
    done = check(wrong)
    assert done.returncode == 1
    assert [line.split(":")[1] for line in done.stdout.splitlines()] == ["3", "4", "5", "7"], done.stdout


def test_every_operation_is_known_to_type_checkers() -> None:
    """What `nbparallel.distributed` makes from its list stands there for checkers, and no more."""
    tree = ast.parse(Path(dist.__file__).read_text())
    (block,) = (
        node.body
        for node in tree.body
        if isinstance(node, ast.If) and "_typed = current()" in ast.unparse(node)
    )
    typed = [node.targets[0].id for node in block if isinstance(node, ast.Assign)][1:]
    defined = [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
    assert sorted([*typed, *(name for name in OPERATIONS if name in defined)]) == sorted(OPERATIONS)
