"""Every test runs under the leak check and the hang watchdog of the test ground."""

import os
from pathlib import Path

pytest_plugins = ["nbparallel.testing.plugin", "pytester"]

ROOT = Path(__file__).resolve().parent.parent
# processes that tests start elsewhere (kernels, scripts) import this checkout, installed or not
os.environ["PYTHONPATH"] = os.pathsep.join(str(ROOT / part) for part in (".", "magics", "widgets"))
