"""Parts of a session: how names, tasks and ranks are handled, on this machine or on hosts."""

from __future__ import annotations

import importlib
from typing import Any

from nbparallel import sharing
from nbparallel.session.names.delivery import NameDelivery
from nbparallel.session.processes.elastic_pool import ElasticPool
from nbparallel.session.processes.launch import SupervisorLaunch
from nbparallel.session.processes.limits import check_world_size, usable_cpus
from nbparallel.session.tasks.dispatch import TaskDispatcher

START_METHODS = ("forkserver", "spawn")
SessionParts = tuple[NameDelivery, TaskDispatcher, ElasticPool, Any]
"""And what shows them, if they have views of their own."""


def make_parts(
    world_size: int | None,
    start_method: str,
    launch: SupervisorLaunch | None,
    cluster: Any,
    ranks_per_host: int | None,
    max_hosts: int | None,
) -> SessionParts:
    """Return the parts of a session; parameters and errors as those of `Session`."""
    if sharing.current_store().client != 0:
        raise RuntimeError("a rank or worker cannot start ranks: use a session of the notebook or script")
    if start_method not in START_METHODS:
        raise ValueError(f"start_method must be one of {', '.join(START_METHODS)}, not {start_method!r}")
    if cluster is not None:
        hosts = importlib.import_module("nbparallel.cluster.host_session")  # it stands on this package
        parts: SessionParts = hosts.make_parts(cluster, world_size, start_method, ranks_per_host, max_hosts)
        return parts
    if ranks_per_host is not None or max_hosts is not None:
        raise TypeError("ranks_per_host and max_hosts are about hosts: pass cluster= as well")
    size = usable_cpus() if world_size is None else world_size
    check_world_size(size)
    names = NameDelivery(sharing.current_store())
    tasks = TaskDispatcher(names)
    return names, tasks, ElasticPool(int(size), start_method, launch, names, tasks.output_of), None
