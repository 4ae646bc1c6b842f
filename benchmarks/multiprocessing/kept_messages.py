"""How many queued arrays a consumer can keep where producer and consumer may have few descriptors.

python -m benchmarks.multiprocessing.kept_messages
"""

from __future__ import annotations

import json
import resource
import sys
import time
from queue import Empty
from typing import Any

import numpy as np

import nbparallel as nbp
import nbparallel.multiprocessing as mp
from benchmarks.multiprocessing.launches import launch
from benchmarks.report import Figure, Section, human_seconds

MODULE = "benchmarks.multiprocessing.kept_messages"
AIM = 10_000
LENGTH = 300_000
DESCRIPTORS = 256
WAIT_SECONDS = 60.0


def _limit() -> None:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (DESCRIPTORS, hard))


def _produce(queue: Any, count: int) -> None:
    _limit()
    for n in range(count):
        queue.put(np.full(LENGTH, n % 251, np.uint8))
    queue.put(None)


def _consume(queue: Any, answers: Any) -> None:
    """Keep what comes until all is there, an error is, or nothing comes any more."""
    _limit()
    kept: list[Any] = []
    error = ""
    try:
        while (array := queue.get(timeout=WAIT_SECONDS)) is not None:
            kept.append(array)
    except (nbp.NbParallelError, Empty) as raised:
        error = type(raised).__name__
    if any(array[0] != n % 251 or array[-1] != n % 251 for n, array in enumerate(kept)):
        error = "wrong contents"
    answers.send((len(kept), error))


def launched(count: int) -> dict[str, Any]:
    """Send `count` arrays; return how many the consumer kept, the error that ended it, and the seconds."""
    context = mp.get_context("fork")
    queue, (reader, writer) = context.Queue(), context.Pipe(duplex=False)
    began = time.perf_counter()
    consumer = context.Process(target=_consume, args=(queue, writer), daemon=True)
    producer = context.Process(target=_produce, args=(queue, count), daemon=True)
    consumer.start()
    producer.start()
    writer.close()
    kept, error = reader.recv()
    seconds = time.perf_counter() - began
    producer.terminate()
    producer.join()
    consumer.join()
    return {"kept": kept, "error": error, "seconds": seconds}


def run(*, quick: bool) -> Section:
    """Send the arrays in an interpreter of its own."""
    del quick  # one round says it
    found = launch(MODULE, "--launch")
    value = f"{found['kept']:,} kept in {human_seconds(found['seconds'])}"
    if found["error"]:
        value += f", then {found['error']}"
    row = Figure(
        f"{AIM:,} arrays of {LENGTH // 1000} KB",
        value,
        aim=f"{AIM:,}",
        met=found["kept"] >= AIM and not found["error"],
    )
    return Section(
        f"Arrays of a queue that are kept, with {DESCRIPTORS} descriptors",
        [row],
        "Producer and consumer have the limit, the program that starts them has not. The contents of all "
        "are checked at the end.",
    )


def main() -> None:
    """Print the figure: with ``--launch`` as JSON."""
    if "--launch" in sys.argv:
        print(json.dumps(launched(AIM)))
    else:
        print(run(quick=False).figures[0].value)


if __name__ == "__main__":
    main()
