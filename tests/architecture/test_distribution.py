"""What a stranger gets: sdist and wheel are whole, and the wheel alone does what README shows.

`make dist` runs these with the tools that they need, and keeps what they built.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

import pytest

import nbparallel
from tests.docs.test_examples import examples

ROOT = Path(__file__).resolve().parent.parent.parent
NAME = f"nbparallel-{nbparallel.__version__}"
CLEAN = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
OFFLINE = re.compile("No matching distribution|Failed to establish|Max retries|getaddrinfo|EAI_AGAIN")

CELLS = """
import json, sys
from jupyter_client.manager import start_new_kernel

manager, client = start_new_kernel(kernel_name="python3", startup_timeout=60)
try:
    for code in json.load(sys.stdin):
        said = {"text": "", "error": ""}

        def take(message):
            if message["msg_type"] == "clear_output":  # then what is left is sent again
                said["text"] = ""
            elif message["msg_type"] == "stream":
                said["text"] += message["content"]["text"]
            elif message["msg_type"] == "display_data":  # a note
                said["text"] += message["content"]["data"]["text/plain"] + "\\n"
            said["error"] = message["content"].get("ename", said["error"])

        client.execute_interactive(code, timeout=60, output_hook=take)
        print(json.dumps(said))
finally:
    client.stop_channels()
    manager.shutdown_kernel(now=False)
"""
"""A program that runs cells in a kernel of its own environment, and prints what each left."""

pytestmark = [pytest.mark.slow, pytest.mark.time_limit(600)]


def run(command: Sequence[str | Path], where: Path, **options: object) -> subprocess.CompletedProcess[str]:
    """Run a program outside of the clone's environment."""
    return subprocess.run(  # type: ignore[call-overload, no-any-return]
        [str(part) for part in command],
        **{"cwd": where, "env": CLEAN, "capture_output": True, "text": True, "timeout": 300, **options},
    )


def succeed(command: Sequence[str | Path], where: Path, **options: object) -> str:
    """Run a program that must succeed, and return what it printed; without an index the test is skipped."""
    done = run(command, where, **options)
    if done.returncode and OFFLINE.search(done.stderr):
        pytest.skip(f"no package index can be reached: {done.stderr.strip().splitlines()[-1]}")
    assert done.returncode == 0, f"{command}:\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout


def need(module: str) -> None:
    """Skip where a tool of requirements/dist.txt is not installed."""
    try:
        metadata.distribution(module)  # not `find_spec`: the clone may have a folder of that name
    except metadata.PackageNotFoundError:
        pytest.skip(f"{module} is not installed: `make dist` installs it")


def pip_of_new(environment: Path) -> list[str]:
    """Make an environment that has nothing, and return how pip is called for it."""
    succeed([sys.executable, "-m", "venv", "--without-pip", environment], environment.parent)
    return [sys.executable, "-m", "pip", "--python", str(environment / "bin" / "python")]


def repository_files(*folders: str) -> set[str]:
    """Return the files that a clone of this state has."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--", *folders]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("no git repository: which files a clone has is not known")
    return {name for name in listed.stdout.split("\0") if name and (ROOT / name).is_file()}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder with an sdist of this state, and a wheel that was built from it."""
    need("build")
    folder = Path(os.environ.get("NBP_DIST") or tmp_path_factory.mktemp("dist"))
    # the tools of this environment: how they are fetched for a stranger is pip's business
    succeed([sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, ROOT], folder.parent)
    return folder


@pytest.fixture(scope="module")
def environment(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return an environment outside of the clone that has the wheel, and what it asks for."""
    folder = tmp_path_factory.mktemp("stranger")
    pip = pip_of_new(folder / "env")
    pins = ["-c", ROOT / "requirements" / "test.txt"]
    wheel = built / f"{NAME}-py3-none-any.whl"
    succeed([*pip, "install", "-q", *pins, wheel], folder, timeout=540)
    succeed([*pip, "check"], folder)
    return folder / "env"


def test_both_are_whole(built: Path) -> None:
    """The sdist is the clone, with `make demo` and `make test`; the wheel has each file of the packages."""
    with tarfile.open(built / f"{NAME}.tar.gz") as sdist:
        files = {member.name for member in sdist if member.isfile()}
        executable = {member.name for member in sdist if member.mode & 0o100}
    assert files == {f"{NAME}/{name}" for name in repository_files() | {"PKG-INFO"}}
    assert f"{NAME}/.ci/run" in executable
    with zipfile.ZipFile(built / f"{NAME}-py3-none-any.whl") as wheel:
        held = {name for name in wheel.namelist() if f"{NAME}.dist-info/" not in name}
        entry_points = wheel.read(f"{NAME}.dist-info/entry_points.txt").decode()
    packages = repository_files("nbparallel", "magics/nbparallel_magics", "widgets/nbparallel_widgets")
    assert held == {re.sub("^(magics|widgets)/", "", name) for name in packages}
    assert "[torch.backends]\nnbparallel = " in entry_points


def test_an_index_takes_both(built: Path) -> None:
    """The metadata are well formed, and the README is a page that an index can show."""
    need("twine")
    files = [built / f"{NAME}.tar.gz", built / f"{NAME}-py3-none-any.whl"]
    succeed([sys.executable, "-m", "twine", "check", "--strict", *files], built)


def test_the_wheel_alone_runs_the_cells_of_the_readme(environment: Path, tmp_path: Path) -> None:
    """In an environment with nothing else, cells print what the page shows, and no requirement is missing."""
    python = environment / "bin" / "python"
    assert succeed([python, "-m", "nbparallel", "--version"], tmp_path) == f"{nbparallel.__version__}\n"
    where = "import nbparallel, nbparallel_magics as m\nprint(nbparallel.__file__, m.__file__)"
    cells = [where, *(example.code for example in examples(ROOT / "README.md")), "%parallel_stop"]
    printed = succeed([python, "-c", CELLS], tmp_path, input=json.dumps(cells)).splitlines()
    said = [json.loads(line) for line in printed]
    assert said[0]["text"].count(str(environment)) == 2
    expected = [example.options.get("raises", "") for example in examples(ROOT / "README.md")]
    assert [one["error"] for one in said] == ["", *expected, ""], said
    shown = re.findall(r"^```text\n(.*?)^```", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    assert said[2]["text"] == shown[0]


def test_uninstalling_leaves_nothing(built: Path, tmp_path: Path) -> None:
    """Every file that the wheel brought is gone, compiled ones too."""
    pip = pip_of_new(tmp_path / "env")

    def files() -> set[str]:
        return {str(path) for path in (tmp_path / "env").rglob("*") if path.suffix != ".pyc"}

    before = files()
    succeed([*pip, "install", "-q", "--no-deps", built / f"{NAME}-py3-none-any.whl"], tmp_path)
    succeed([tmp_path / "env/bin/python", "-c", "import nbparallel.errors"], tmp_path)
    assert len(files() - before) > 300
    succeed([*pip, "uninstall", "-q", "-y", "nbparallel"], tmp_path)
    assert files() == before
    assert list((tmp_path / "env").rglob("nbparallel*")) == []
