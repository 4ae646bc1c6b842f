"""The core names no satellite: its hooks say what is done, not for whom.

Identifiers are looked at, and texts that are one, as in ``sys.modules["torch"]``.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import pytest

from tests.architecture.source_tree import CORE, SATELLITES, TREE

_S, _M, _D = "nbparallel.session", "nbparallel_magics", "nbparallel.distributed"
NAMED: dict[str, dict[str, str]] = {
    "races?": {
        "nbparallel.engine.shell": "`%parallel_races` among the magics that a rank refuses",
        f"{_S}.session": "`check_races=` of `Session.run`",
        f"{_S}.tasks.cell": "the same among a cell's options",
        f"{_S}.results": "`races` and `race_report` of a cell's result",
        f"{_M}.flags": "`%parallel_races`",
        f"{_M}.magics": "the same",
        f"{_M}.state": "what `--check-races` shows",
    },
    "profile|profiling": {
        "nbparallel.engine.shell": "`%parallel_profile` among the magics that a rank refuses",
        f"{_S}.session": "`profile=` of `Session.run`",
        f"{_S}.tasks.cell": "the same among a cell's options",
        f"{_S}.results": "`profile` of a cell's result",
        f"{_S}.functions": "`profile=` of `map`",
        f"{_S}.tasks.item_map": "the same",
        f"{_M}.flags": "`%parallel_profile`",
        f"{_M}.magics": "the same",
        f"{_M}.state": "what `--profile` shows",
        f"{_M}.output.cell_views": "the picture",
    },
    "hosts?|hosted|clusters?|dask": {
        "nbparallel.errors": "`HostBoundaryError`, `HostLostError`",
        _D: "`dist.host_group`",
        f"{_D}.api.groups": "the same",
        "nbparallel.engine.shell": "`%parallel_cluster` among the magics that a rank refuses",
        f"{_S}.session": "`cluster=`, `ranks_per_host=`, `max_hosts=` and `hosts` of `Session`",
        f"{_S}.monitoring.activity": "`host` of `RankActivity`",
        f"{_S}.monitoring.segments": "`host` of `SharedSegment`",
        f"{_S}.monitoring.timeline": "`host` of `RankRow`, and how well clocks agree",
        f"{_M}.flags": "`%parallel_cluster`",
        f"{_M}.magics": "the same",
        f"{_M}.views.status": "the column of `%parallel_status`",
    },
    "guests?": {},
    "workers?|joblib": {"nbparallel.errors": "`WorkerDiedError`"},
    "torch": {
        "nbparallel.sharing.arrays": "what `nbp.share` is annotated with",
        "nbparallel.sharing.tensors": "tensors as arrays",
        "nbparallel.sharing.tensor_storage": "tensors moved to shared memory",
        "nbparallel.transfer.tensor_pickling": "tensors in pickles",
        "nbparallel.engine.environment": "its threads, random streams and settings, which cells find set",
        f"{_S}.names.notebook_settings": "the same, read in the notebook",
        f"{_D}.api.groups": "arguments of torch's `new_group`",
        f"{_D}.work": "`get_future`",
        f"{_D}.slots.mismatch": "how a tensor is copied, in an error's text",
    },
}
"""By satellite, the words that are its own, and the modules of the core that name it all the same, and why.

The lists are exact: a module that names it no more has to leave the list.
"""


@pytest.mark.parametrize("words", NAMED)
def test_the_core_names_no_satellite(words: str) -> None:
    """Only the modules above, most of them for what users write, have its name."""
    found = {
        module
        for module, tree in TREE.trees.items()
        if module.startswith(CORE) and not module.startswith(SATELLITES)
        if any(re.search(rf"(?<![a-z])({words})(?![a-z])", name) for name in (module, *_names(tree)))
    }
    assert found == set(NAMED[words])


def test_names_are_found_wherever_they_stand() -> None:
    """Of modules, classes, functions, arguments, attributes; not in prose."""
    source = """
import a.torch
from dask import x as race
class HostPool:
    def f(self, guest): "a joblib"; self.pool_workers; get("joblib")
"""
    found = set(_names(ast.parse(source)))
    names = "a.torch", "dask", "x", "race", "host_pool", "f", "self", "guest", "pool_workers", "get", "joblib"
    assert found == set(names)


def _names(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        for field in ("id", "attr", "arg", "name", "asname", "module"):
            if isinstance(name := getattr(node, field, None), str):
                yield re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.isidentifier():
            yield node.value
