"""Every test runs under the leak check of `nbparallel.testing` and the hang watchdog of the harness."""

import contextlib
import os
import re
import sys
from importlib import metadata
from pathlib import Path

import hypothesis
import pytest

HARNESS = ("watchdog", "kernel.kernel_fixtures", "repetitions", "sessions", "tiers", "turns")
pytest_plugins = ["nbparallel.testing.plugin", *(f"tests.harness.{name}" for name in HARNESS), "pytester"]

ROOT = Path(__file__).resolve().parent.parent
# processes that tests start elsewhere (kernels, scripts) import this checkout, installed or not
first = [os.environ["NBP_PATH"]] if "NBP_PATH" in os.environ else []  # such as of an older library
os.environ["PYTHONPATH"] = os.pathsep.join(
    [*first, *(str(ROOT / part) for part in (".", "magics", "widgets"))]
)
# hundreds of them: without bytecode each would compile this checkout again, 0.1 s
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# autograd starts threads of a graphics card's, with descriptors, which no test is about and no fork survives
os.environ["CUDA_VISIBLE_DEVICES"] = ""

# how long one example takes says how busy the machine is: the watchdog ends what hangs
hypothesis.settings.register_profile(
    "nbparallel", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("nbparallel")

FAULT_FILES = {
    "test_faults.py",
    "test_mismatch.py",
    "test_ended_ranks.py",
    "test_deadlock.py",
    "test_damaged_handles.py",
    "test_fault_matrix.py",
    "test_losses.py",
    "test_every_frame.py",
}


IGNORED = (DeprecationWarning, PendingDeprecationWarning, ImportWarning, ResourceWarning)
FILTERS = [("ignore", None, category, None, 0) for category in IGNORED]


@pytest.fixture(autouse=True)
def ranks_have_pythons_filters(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Give ranks the filters of Python: in a test's own process, which they follow, a warning is an error.

    A test that says which filters it wants, or is about them, has its own on ranks too.
    """
    own = request.node.get_closest_marker("filterwarnings") is not None
    if not own and request.path.name != "test_notebook_settings.py":
        from nbparallel.session.names import notebook_settings

        monkeypatch.setitem(notebook_settings.READERS, "warnings", lambda _: FILTERS)


def pytest_report_header() -> str:
    """Name what is installed in another version than the pinned one: what fails may be news of theirs."""
    pins = dict(re.findall(r"^([\w.-]+)==(\S+)", (ROOT / "requirements/test.txt").read_text(), re.MULTILINE))
    found = []
    for name, pin in pins.items():
        with contextlib.suppress(metadata.PackageNotFoundError):
            if (version := metadata.version(name)) != pin:
                found.append(f"{name} {version} ({pin})")
    return "other than the pins: " + (", ".join(found) or "nothing")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of faults, by folder, file or name: ``make sweep`` repeats them."""
    for item in items:
        found = re.match(r"test_(f\d+)_", item.name)
        if found or "faults" in item.path.parts or item.path.name in FAULT_FILES:
            item.add_marker(pytest.mark.fault(found[1] if found else item.path.stem))
