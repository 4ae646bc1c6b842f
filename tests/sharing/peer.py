"""Another process of a session, for tests: a connected store that runs what it is told to."""

import pickle
import sys

import numpy as np

from nbparallel.channel import Channel, SegmentClient
from nbparallel.errors import ChannelClosedError
from nbparallel.sharing import Store
from nbparallel.sharing.memory.array_layout import describe_dtype
from nbparallel.wire.frames import Kind


def main():
    """Answer until the other end closes."""
    client, segments, orders = map(int, sys.argv[1:])
    store = Store(client)
    store.connect(SegmentClient(Channel.from_fd(segments), client))
    channel = Channel.from_fd(orders)
    names = {"np": np, "store": store, "describe_dtype": describe_dtype}
    while True:
        try:
            frame = channel.receive(60.0)
        except ChannelClosedError:
            return
        if frame is None:
            return
        source, values = pickle.loads(frame.payload)
        names.update(values, result=None)
        error = None
        try:
            exec(source, names)
        except Exception as caught:  # noqa: BLE001  # whatever it is, the test raises it
            error = caught
        channel.send(Kind.TASK, pickle.dumps((names["result"], error)))


main()
