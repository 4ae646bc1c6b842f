"""Runs torch's own tests of torch.distributed over a backend: ``python torchs_suite.py BACKEND SIZE CASE…``.

``1/4`` instead of names runs every fourth of all cases, from the second on.

torch ships them in its wheel.  They name backends in decorators; ours is let through wherever gloo is, by a
name that is equal to both.  Each case forks processes of its own: to import torch in each would take most of
the time.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import sys
import tempfile
import types
import unittest
from importlib.util import find_spec
from pathlib import Path

SUITE = "torch.testing._internal.distributed.distributed_test"
GPU = re.compile("cuda|nccl|gpu|nvtx|hccl|ddp_profiling|logging_data|ddp_uneven_input_|compile")
READS_BACKEND = 'BACKEND = os.environ["BACKEND"]'


class LikeGloo(str):
    """The name of a backend that takes part in what is meant for gloo."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return str.__eq__(self, other) is True or other == "gloo"

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash("gloo")


def prepare(backend: str, size: int) -> None:
    """Set what torch's suite reads, in this process and in those that it starts."""
    folder = tempfile.mkdtemp(prefix="torchs-suite-")
    for name in ("barrier", "test_dir", "init_dir"):
        (Path(folder) / name).mkdir()
    os.environ.update(
        BACKEND=backend, WORLD_SIZE=str(size), TEMP_DIR=folder, INIT_METHOD=f"file://{folder}/init_dir/shared",
        GLOO_SOCKET_IFNAME="lo", OMP_NUM_THREADS="1",
    )  # fmt: skip


def load() -> types.ModuleType:
    """Return torch's module of tests, for the backend of the environment."""
    from torch.testing._internal.common_distributed import DistTestCases

    backend = os.environ["BACKEND"]
    DistTestCases.backend_feature["plugin"].add(backend)
    for sets in (DistTestCases.skip_collective, DistTestCases.backend_feature):
        for names in sets.values():
            if "gloo" in names:
                names.add(backend)
    spec = find_spec(SUITE)
    assert spec is not None
    assert spec.origin is not None
    source = Path(spec.origin).read_text()
    assert READS_BACKEND in source, "this torch reads the backend elsewhere"
    module = types.ModuleType(SUITE)
    module.__file__ = spec.origin
    module.__dict__["LikeGloo"] = LikeGloo if backend != "gloo" else str
    sys.modules[SUITE] = module
    source = source.replace(READS_BACKEND, f"BACKEND = LikeGloo({backend!r})")
    exec(compile(source, spec.origin, "exec", dont_inherit=True), module.__dict__)
    return module


def main(backend: str, size: int, names: list[str]) -> int:
    """Run cases, by default all for CPUs; print what became of each, and return the exit status."""
    prepare(backend, size)
    suite = load()

    class Torchs(suite.TestDistBackend, suite.DistributedTest._DistTestBase):  # type: ignore[misc, name-defined]
        """torch's cases."""

        def setUp(self) -> None:
            """Start the processes of a case."""
            super().setUp()
            self._start_processes(multiprocessing.get_context("fork").Process)

    if not names or "/" in names[0]:
        first, step = names[0].split("/") if names else (0, 1)
        cases = [name for name in dir(Torchs) if name.startswith("test_") and not GPU.search(name)]
        names = cases[int(first) :: int(step)]
    result = unittest.TextTestRunner(verbosity=2).run(unittest.TestSuite(Torchs(name) for name in names))
    outcomes = dict.fromkeys(names, "ok")
    for outcome in ("failures", "errors", "skipped"):
        for case, reason in getattr(result, outcome):
            outcomes[case.id().rpartition(".")[2]] = f"{outcome}: {reason}"
    print(f"OUTCOMES {json.dumps(outcomes)}")
    return not result.wasSuccessful()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2]), sys.argv[3:]))
