"""Which ranks stand on which hosts, and what is refused before any is started."""

from __future__ import annotations

from typing import Any

import pytest

import nbparallel as nbp
from nbparallel.cluster.host_session import place_ranks

pytestmark = pytest.mark.time_limit(60)


def test_ranks_are_placed_on_hosts() -> None:
    """By cpus, by `ranks_per_host`, or filled up to a number; whatever does not fit says what does."""
    four = {"a": 2, "b": 3, "c": 1, "d": 8}
    assert place_ranks(four, None, None, 3).firsts == (0, 2, 5, 6)
    assert place_ranks(four, None, 2, None).firsts == (0, 2, 4, 6, 8)
    assert place_ranks(four, 4, None, None).hosts == ("a", "b")
    assert place_ranks(four, 4, None, None).firsts == (0, 2, 4)
    with pytest.raises(ValueError, match="6 ranks do not fit these hosts, which take 5: 2 on a, 3 on b"):
        place_ranks(four, 6, None, 2)
    many = {f"h{i:02}": 1 for i in range(40)}
    with pytest.raises(ValueError, match="at most 32 hosts, and the cluster has 40: pass max_hosts=32"):
        place_ranks(many, None, None, None)
    assert place_ranks(many, None, None, 32).world_size == 32
    wrong: list[tuple[str, Any, type[Exception]]] = [
        ("ranks_per_host", 0, ValueError),
        ("max_hosts", 33, ValueError),
        ("max_hosts", True, TypeError),
        ("ranks_per_host", "2", TypeError),
    ]
    for name, value, kind in wrong:
        arguments: dict[str, Any] = {"ranks_per_host": None, "max_hosts": None, name: value}
        with pytest.raises(kind, match=name):
            place_ranks(four, None, **arguments)


def test_what_is_no_cluster_is_refused() -> None:
    """With its type; options of hosts need a cluster."""
    with pytest.raises(TypeError, match=r"Client of dask\.distributed or one of its clusters, not str"):
        nbp.Session(cluster="tcp://10.0.0.1:8786")
    with pytest.raises(TypeError, match="pass cluster="):
        nbp.Session(2, ranks_per_host=2)
