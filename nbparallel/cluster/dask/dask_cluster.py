"""Dask's cluster, at the kernel's end.

Some facts about distributed (2026.8, its source):

* ``scheduler.broadcast`` passes a message to handlers of workers and returns what each replied; the kernel
  needs no connection with a worker.  An exception of a handler comes back wrapped: failures are data here;
* events of a topic come in order, and the scheduler keeps the last 1000 of each;
* a task of a lost worker that is pinned to it waits forever.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import itertools
import platform
import secrets
import sys
import time
from collections.abc import Mapping
from typing import Any

import dask
import distributed

from nbparallel.cluster.dask.node_plugin import LARGE, add_plugin, hold, packed
from nbparallel.cluster.host_messages import NodeReply
from nbparallel.errors import StartError
from nbparallel.session.interrupts import InterruptCounter

START_SECONDS = 120.0
"""Bound for the start of a node: for its anchor to hold, and for its imports; the worker has shorter ones."""
WORKERS_SECONDS, QUEUE_SECONDS = 30.0, 3600.0
"""How long a cluster may take to have a first worker; and one whose jobs may wait in a queue."""
RETURN_SECONDS = 3.0
"""How long it may take to have one again, and others after the first; and until a wait is said."""
LOOK_SECONDS = 0.2
LOOP_SECONDS, END_SECONDS = 5.0, 3.0
"""How long the client's own thread may take to do nothing, and nodes to end."""
RUNNING, STARTING = "running", "init"
_dask: Any = distributed


def _say(text: str) -> None:
    """Say something while the session is made, when no cell has an output for it."""
    print(f"[nbparallel] {text}", file=sys.stderr, flush=True)  # noqa: T201


class DaskAnchor:
    """The anchor of one host, at the kernel's end."""

    def __init__(self, key: str, host: str, address: str, future: Any) -> None:
        self.key, self.host, self.address, self.future = key, host, address, future
        self.released = self.given_up = False
        self.ended = "the host is lost"  # the error of calls to it once it is released

    def release(self, *, give_up: bool = False) -> None:
        """End the node, and everything that it has started; does not wait (idempotent).

        With `give_up` the host has not answered: it is not listed any more until it is started anew.
        """
        self.released = True
        self.given_up |= give_up
        self.future.release()


class DaskCluster:
    """Hosts of a Dask cluster: the machines of its workers.

    A client stays the caller's; of a cluster object one is made, and closed at the end.
    """

    def __init__(self, cluster: Any) -> None:
        self._owned = not isinstance(cluster, distributed.Client)
        if self._owned and not hasattr(cluster, "scheduler_address"):
            raise TypeError(f"cluster must be a Client or a cluster object, not {type(cluster).__name__}")
        self._client = _dask.Client(cluster) if self._owned else cluster
        if self._client.asynchronous:
            raise TypeError("the client was made with asynchronous=True: make one without, for this session")
        if self._client.status != RUNNING:
            raise ValueError(f"the client is {self._client.status}: make a new one")
        self.address: str = self._client.scheduler.address
        self._topic = f"nbp-{secrets.token_hex(6)}"
        self._anchors: dict[str, DaskAnchor] = {}
        self._count = itertools.count()
        self._scheduler = ""  # its id: it has another one after a restart
        self._handler: Any = None  # the session's `HostPool`
        self._watches: list[tuple[DaskAnchor, concurrent.futures.Future[None]]] = []
        try:
            self._on_loop(asyncio.sleep(0)).result(LOOP_SECONDS)
        except TimeoutError:
            raise ValueError(
                "the client's event loop does not run: make a client in this process, after it was forked"
            ) from None

    def hosts(self) -> dict[str, int]:
        """Return how many ranks each machine that is there now is meant to hold, in order of their names."""
        return {name: sum(w["nthreads"] for w in some) for name, some in self._by_host().items()}

    def _by_host(self) -> dict[str, list[dict[str, Any]]]:
        """Return the workers of each host, hosts by name."""
        if self._client.status != RUNNING:
            raise StartError(
                f"the client is {self._client.status}: if the scheduler has ended, its workers have too, and "
                "all variables with them; make a new cluster, client and session"
            )
        try:
            listed = self._await_workers()
        except OSError as error:
            problem = f"{type(error).__name__}: {error}"
            raise StartError(f"the scheduler cannot be reached, is the network down? ({problem})") from error
        machines, found = dict[Any, list[dict[str, Any]]](), dict[str, list[dict[str, Any]]]()
        jobs = self._jobs  # two on a machine are two hosts: each has processors and memory of its own
        silent = {anchor.address for anchor in self._anchors.values() if anchor.given_up}
        for address, worker in listed.items():
            if address not in silent:  # the scheduler has perhaps not noticed that it does not answer
                name = f"{worker['name']}-"  # of a job with several workers: its own, and a number
                job = next((job for job in jobs if name.startswith(f"{job}-")), "")
                machines.setdefault((worker["host"], job), []).append({**worker, "address": address})
        for (machine, _), workers in machines.items():
            workers.sort(key=lambda worker: str(worker["name"]))
            name = str(workers[0]["name"])
            found[machine if "://" in name else name] = workers
        return dict(sorted(found.items()))

    def _await_workers(self) -> dict[str, dict[str, Any]]:
        """Return the workers: at first a moment is left for all that the cluster has asked for.

        An interrupt ends the wait, also where the caller counts them.
        """
        jobs, began, said = self._jobs, time.monotonic(), False
        asked = 1 if self._anchors else max(1, len(getattr(self._client.cluster, "plan", ())))
        seconds = RETURN_SECONDS if self._anchors else QUEUE_SECONDS if jobs else WORKERS_SECONDS
        deadline = began + seconds
        with InterruptCounter() as interrupts:
            while len(listed := self._listed()) < asked and (now := time.monotonic()) < deadline:
                interrupts.check()
                if listed:
                    deadline = min(deadline, now + RETURN_SECONDS)
                elif jobs and not said and now > began + RETURN_SECONDS:
                    said = True
                    waiting = f"{len(jobs)} jobs wait in the queue, or start"
                    _say(f"no worker yet: {waiting}; an interrupt ends the wait")
                time.sleep(LOOK_SECONDS)
        if not listed:
            raise StartError(f"the cluster had no worker in {seconds:.0f} s: {self._advice}")
        if len(listed) < asked:
            _say(
                f"{len(listed)} of {asked} workers are there, and ranks are placed on these; once the others "
                "are, name the cluster again"
            )
        return listed

    @property
    def _jobs(self) -> list[str]:
        """Names of the jobs of a batch system that the cluster consists of."""
        cluster = self._client.cluster  # of dask-jobqueue, which need not be installed here
        return list(map(str, cluster.worker_spec)) if hasattr(cluster, "job_script") else []

    @property
    def advice(self) -> str:
        """How to have another worker in place of one that is lost."""
        if not (jobs := self._jobs):
            return "start a worker"
        patience = dask.config.get("distributed.deploy.lost-worker-timeout")
        return f"`cluster.scale(jobs={len(jobs)})` starts one, from {patience} after the loss on"

    def _listed(self) -> dict[str, dict[str, Any]]:
        """Return the workers that the scheduler has, by address.

        Not `scheduler_info`: it returns what the client knows, which has no workers each time that the client
        renews it by itself, for totals, between the answer and the look at it.
        """
        answer = self._client.sync(self._client.scheduler.identity)
        self._scheduler = self._scheduler or answer["id"]
        if answer["id"] != self._scheduler:
            raise StartError(
                "the scheduler has been restarted, and all ranks are gone: %parallel_stop, then "
                "%parallel_cluster"
            )
        return dict(answer["workers"])

    @property
    def _advice(self) -> str:
        """What to do if there is no worker."""
        if jobs := self._jobs:
            return f"its jobs ended, or wait; `cluster.scale(jobs={len(jobs)})` submits what is missing"
        if not isinstance(self._client.cluster, _dask.LocalCluster):
            return "scale it up"
        return (
            "Stop ends the workers of a LocalCluster, processes of the notebook; make a new one, with "
            "processes=False to keep it"
        )

    def events(self, handler: Any) -> None:
        """Pass to `handler` what nodes emit, for each in order; called once, before the first anchor."""
        self._handler = handler
        self._client.subscribe_topic(self._topic, self._on_event)

    def _on_event(self, event: tuple[float, Any]) -> None:
        _, message = event
        key = message.get("key") if isinstance(message, dict) else None  # any client can log to any topic
        anchor = self._anchors.get(str(key).partition("/")[2].partition("/")[2])
        if self._handler is not None and anchor is not None and anchor.key == key:  # not an earlier node's
            if "data" in message:
                self._handler.event(anchor.host, message["data"])
            else:
                self._handler.unlinked(anchor.host, *message["unlinked"])

    def anchor(self, host: str) -> DaskAnchor:
        """Start a node, and hold its host until the anchor is released; StartError if that is impossible."""
        workers = self._by_host().get(host)
        if not workers:
            raise StartError(f"host {host} is not in the cluster any more")
        usable = (w for status in (RUNNING, STARTING) for w in workers if w["status"] == status)
        if (worker := next(usable, None)) is None:
            raise StartError(f"host {host} takes no tasks: its workers are {workers[0]['status']}")
        address, key = worker["address"], f"{self._topic}/{next(self._count)}/{host}"
        try:
            if (system := self._client.run(platform.system, workers=[address])[address]) == "Linux":
                self._client.run(add_plugin, workers=[address])
        except Exception as error:
            raise StartError(
                f"host {host}: nbparallel cannot be used there ({type(error).__name__}: {error}); it must be "
                "installed on every worker, as distributed.PipInstall does"
            ) from error
        if system != "Linux":
            raise StartError(f"host {host} runs {system}, and ranks need Linux: leave its workers out")
        future = self._client.submit(
            hold, key, key=key, workers=[address], allow_other_workers=False, retries=0, pure=False
        )
        anchor = DaskAnchor(key, host, address, future)
        if (former := self._anchors.get(host)) is not None:
            former.release()  # of a start that was interrupted
        self._anchors[host] = anchor
        start = {"op": "nbp_start", "key": key, "host": host}
        try:
            self._await_node(anchor, self._on_loop(self._broadcast(start, anchor)))
        except BaseException:
            anchor.release()
            del self._anchors[host]
            raise
        self._watches.append((anchor, self._on_loop(self._watch(anchor))))
        return anchor

    def _await_node(self, anchor: DaskAnchor, starting: concurrent.futures.Future[Any]) -> None:
        """Wait until a node runs; a task that the cluster does not take ends the wait."""
        deadline = time.monotonic() + START_SECONDS
        while not starting.done() and time.monotonic() < deadline:
            if anchor.future.status == "error":
                problem = anchor.future.exception()
                raise StartError(f"host {anchor.host} takes no tasks: {type(problem).__name__}: {problem}")
            concurrent.futures.wait([starting], 0.25)
        if problem := starting.result()[0].get("error") if starting.done() else "its worker does not answer":
            raise StartError(f"host {anchor.host}: {problem}")

    async def _watch(self, anchor: DaskAnchor) -> None:
        (reply,) = await self._broadcast({"op": "nbp_watch", "key": anchor.key}, anchor)
        if anchor.released or self._handler is None:
            return
        reason = reply.get("error") or reply.get("ended") or "its node ended"
        anchor.ended += f": {reason}"
        self._handler.lost(anchor.host, reason)
        anchor.release()  # after that: a thread that sees it released finds the loss

    def call(self, op: str, data: Mapping[str, bytes], timeout: float) -> dict[str, NodeReply]:
        """Have nodes handle calls, all at once, and return what each replied.

        Calls to one node begin in order, and the next does not wait for the end of the one before.  With a
        `timeout` of 0 nothing is waited for.
        """
        groups: dict[Any, list[DaskAnchor]] = {}
        for host, part in data.items():
            if (anchor := self._living(host)) is not None:
                groups.setdefault(id(part) if len(part) >= LARGE else host, []).append(anchor)
        asked = []
        for anchors in groups.values():
            what = packed(data[anchors[0].host])
            message = {"op": "nbp_call", "keys": [anchor.key for anchor in anchors], "call": op, "data": what}
            asked.append((anchors, self._on_loop(self._broadcast(message, *anchors))))
        known = self._anchors
        replies = {h: NodeReply(error=known[h].ended if h in known else "the host is lost") for h in data}
        done, _ = concurrent.futures.wait([future for _, future in asked], timeout) if timeout else ((), ())
        for anchors, future in asked:
            found = future.result() if future in done else [{"silent": True}] * len(anchors)
            replies |= {a.host: NodeReply(**reply) for a, reply in zip(anchors, found, strict=True)}
        return replies

    def _living(self, host: str) -> DaskAnchor | None:
        anchor = self._anchors.get(host)
        return None if anchor is None or anchor.released else anchor

    def _on_loop(self, coroutine: Any) -> concurrent.futures.Future[Any]:
        return asyncio.run_coroutine_threadsafe(coroutine, self._client.loop.asyncio_loop)

    async def _broadcast(self, message: dict[str, Any], *anchors: DaskAnchor) -> list[dict[str, Any]]:
        """Pass a message to workers; whatever goes wrong is an ``error`` of the reply."""
        workers = [anchor.address for anchor in anchors]
        try:
            replies = await self._client.scheduler.broadcast(msg=message, workers=workers, on_error="return")
        except Exception as error:  # noqa: BLE001  the connection with the scheduler may break in many ways
            return [{"error": f"the scheduler is gone ({type(error).__name__}: {error})"}] * len(workers)
        return [_reply(replies[worker]) for worker in workers]

    def link(self, one: str, other: str, timeout: float) -> None:
        """Connect two hosts; StartError if they cannot be."""
        near, far = self._living(one), self._living(other)
        if near is None or far is None:
            raise StartError(f"hosts {one} and {other} cannot reach each other: one of them is lost")
        message = {
            "op": "nbp_connect", "key": near.key, "peer": other, "address": far.address, "peer_key": far.key,
            "timeout": timeout,
        }  # fmt: skip
        asked = self._on_loop(self._broadcast(message, near))
        deadline = time.monotonic() + timeout + 5
        while not asked.done() and not (near.released or far.released) and time.monotonic() < deadline:
            concurrent.futures.wait([asked], 0.1)  # the end of a worker is known before it cannot be reached
        if reason := asked.result()[0].get("error") if asked.done() else f"no connection in {timeout:g} s":
            raise StartError(f"the workers of hosts {one} and {other} cannot reach each other: {reason}")

    def close(self) -> None:
        """Release every anchor, wait a moment for the ends of nodes, forget the handler (idempotent)."""
        for anchor in list(self._anchors.values()):  # another thread may still make one
            anchor.release()
        if self._handler is not None:
            self._handler = None
            if self._client.status == RUNNING:
                self._client.unsubscribe_topic(self._topic)
        ending = [watch for anchor, watch in self._watches if not anchor.given_up]
        concurrent.futures.wait(ending, END_SECONDS)  # until nothing is left on any host that answers
        self._watches.clear()
        if self._owned:
            self._client.close()


def _reply(reply: Any) -> dict[str, Any]:
    if isinstance(reply, dict):
        if reply.get("status") != "uncaught-error":
            return reply
        reply = reply.get("exception_text", "uncaught error")
    what = type(reply).__name__ if isinstance(reply, BaseException) else reply
    return {"error": f"its worker process ended, or the connection broke ({what})"}
