"""A program: a process is killed at a point of a message's way, again and again; then nothing is left.

``python -m tests.multiprocessing.messages.kill_rounds METHOD ROUNDS SEED`` prints how many rounds each point
had.  A round has a carrier, a sharing strategy, and a producer or a consumer that is killed

======================  ==========================================================================
``put``                 before it sends
``posted``              when the supervisor knows the message, before it is written
``in the pipe``         when it is written; before it is read
``read``                when its bytes are read
``attached``            when its arrays are there, before the supervisor knows that it was taken
``taken``               after that
``anywhere``            at any instruction of our modules
======================  ==========================================================================

What was written and not read is received; what was not written, or read by the process that was killed, is
gone with it.  Two messages are sent before a consumer comes: it never costs more than one.
"""

from __future__ import annotations

import gc
import os
import random
import signal
import sys
import time
from collections import Counter
from itertools import product

import numpy as np

import nbparallel as nbp
import nbparallel.multiprocessing as mp
from nbparallel.multiprocessing import connection, household, queues
from nbparallel.multiprocessing.messages import parcels
from nbparallel.sharing import current_store
from nbparallel.testing.leaks import LeakCheck
from nbparallel.testing.waiting import wait_until
from tests.faults.interrupts.instruction_signals import InstructionSignals
from tests.harness.stores import names_of
from tests.multiprocessing.household.family import await_held

PRODUCER = ("put", "posted", "in the pipe", "anywhere")
CONSUMER = ("in the pipe", "read", "attached", "taken", "anywhere")
CARRIERS = ("Pipe", "SimpleQueue", "Queue")
STRATEGIES = ("file_descriptor", "file_system")
INSTRUCTIONS = {"produce": 500, "consume": 190}
"""What a message takes of our modules, on Python 3.11; where there are fewer, what follows is killed."""
SECONDS = 60
"""Then a process is not killed any more but stuck."""
OURS = (connection, parcels, parcels, household, parcels, queues, household)


class Link:
    """One carrier, the same for all three."""

    def __init__(self, ctx, kind):
        self.kind = kind
        self.ends = ctx.Pipe(duplex=False) if kind == "Pipe" else (getattr(ctx, kind)(),) * 2

    def send(self, value):
        """Send the first message of this process, and wait until it is written."""
        if self.kind == "Pipe":
            self.ends[1].send(value)
            return
        self.ends[1].put(value)
        if self.kind == "Queue":  # a thread sends
            wait_until(self.has_message)

    def receive(self):
        """Receive."""
        if self.kind == "Queue":
            return self.ends[0].get(timeout=SECONDS)
        return self.ends[0].recv() if self.kind == "Pipe" else self.ends[0].get()

    def has_message(self):
        """Return whether something is to be read."""
        return self.ends[0].poll() if self.kind == "Pipe" else not self.ends[0].empty()

    def close(self):
        """Close what this process has of it."""
        for end in dict.fromkeys(self.ends):
            end.close()
            if self.kind == "Queue":
                end.join_thread()
        self.ends = ()  # a queue that has begun no thread closes its reading end when it is dropped


def value_of():
    """Return an array in memory of its own, a packed one, and a large private one."""
    return nbp.full((400, 400), 1.0), nbp.full(3, 2.0), np.full((400, 400), 3.0)


def check(received):
    """Look at what `value_of` returned."""
    assert [part.flat[-1] for part in received] == [1.0, 2.0, 3.0]


def stop(*_, **__):
    """Say that the point is reached, and wait for the end."""
    os.write(report_fd, b"x")
    time.sleep(SECONDS)
    os._exit(1)


def produce(link, report, point, at):
    """Send one message, up to a point."""
    global report_fd
    report_fd = report.fileno()
    gc.disable()  # it closes former rounds' ends: instructions of ours, while a lock of the library is held
    value = value_of()
    if point == "put":
        stop()
    if point == "anywhere":
        InstructionSignals([module.__file__ for module in OURS], signal.SIGKILL, at).run(
            lambda: link.send(value)
        )
        stop()
    if point == "posted":
        pickle_message = queues.pickle_message
        connection.pickle_message = queues.pickle_message = lambda *args: stop(pickle_message(*args))
    link.send(value)
    stop()


def consume(link, report, point, at):
    """Receive one message, up to a point."""
    global report_fd
    report_fd = report.fileno()
    gc.disable()
    if point == "in the pipe":
        stop()
    if point == "anywhere":
        InstructionSignals([module.__file__ for module in OURS], signal.SIGKILL, at).run(link.receive)
        stop()
    if point == "read":
        parcels.open_parcel = stop
    if point == "attached":
        household.SupervisorConnection.take = stop
    received = link.receive()
    check(received)
    stop()


def kill_round(ctx, side, point, carrier, at):
    """Have one process killed; look at what can still be received, and at what is held."""
    link = Link(ctx, carrier)
    reading, writing = os.pipe()
    with open(reading, "rb", buffering=0) as reports, connection.Connection(writing) as report:
        sent = 0
        if side is consume:
            for _ in range(1 if carrier == "Queue" else 2):
                link.send(value_of())
                sent += 1
        process = ctx.Process(target=side, args=(link, report, point, at))
        process.start()
        report.close()
        reports.read(1)  # it is there, or dead
        process.kill()
        process.join(SECONDS)
        assert process.exitcode == -signal.SIGKILL, process.exitcode
        process.close()
    received = 0
    while link.has_message():
        check(link.receive())
        received += 1
    if side is produce:
        expected = {1} if point == "in the pipe" else {0, 1} if point == "anywhere" else {0}
    else:
        expected = (
            {sent} if point == "in the pipe" else {sent, sent - 1} if point == "anywhere" else {sent - 1}
        )
    case = side.__name__, point, carrier, at
    assert received in expected, (case, received)
    link.close()
    await_held(lambda rows: rows == [], case)
    # the supervisor may answer before it sees that the process has ended
    wait_until(lambda: (report := household.report()) is not None and report.processes == (), case)


def main(method, rounds, number):
    """Have so many rounds."""
    ctx = mp.get_context(method)
    draw = random.Random(number)
    cases = [(produce, point) for point in PRODUCER] + [(consume, point) for point in CONSUMER]
    turns = [(*case, carrier, name) for case, carrier, name in product(cases, CARRIERS, STRATEGIES)]
    draw.shuffle(turns)
    nbp.set_sharing_strategy("file_system")
    kill_round(ctx, produce, "put", "Queue", 0)  # what is started once is there
    current_store().trim()
    leaks = LeakCheck()
    done = Counter()
    for round_number in range(rounds):
        side, point, carrier, strategy = turns[round_number % len(turns)]
        nbp.set_sharing_strategy(strategy)
        kill_round(ctx, side, point, carrier, draw.randrange(1, INSTRUCTIONS[side.__name__]))
        done[f"{side.__name__}: {point}"] += 1
    current_store().trim()
    left = leaks.settle()
    assert not left, left
    household.stop()
    assert not names_of(os.getpid())
    for point, count in sorted(done.items()):
        print(count, point)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
