"""``input()`` and ``getpass`` on a rank, answered by the notebook's user."""

from __future__ import annotations

import builtins
import getpass
import itertools
import pickle
import threading
from collections import deque
from typing import Any

from nbparallel.channel import Channel
from nbparallel.engine.output import RankOutput, pickle_message
from nbparallel.errors import InputRefusedError
from nbparallel.wire.frames import Frame, Kind
from nbparallel.wire.messages import InputReply, InputRequest


class InputRequests:
    """Sends a rank's questions and waits for the answers.

    Attributes
    ----------
    deferred : deque of Frame
        Frames that arrived during a wait; the rank's loop handles them first.
    """

    def __init__(self, channel: Channel, output: RankOutput) -> None:
        self._channel, self._output = channel, output
        self._serials = itertools.count(1)
        self.deferred: deque[Frame] = deque()

    def install(self) -> None:
        """Replace Python's own functions: a rank has no terminal."""
        builtins.input = self.input
        getpass.getpass = self.getpass

    def input(self, prompt: object = "", /) -> str:
        """Ask the notebook's user, and return what was typed; as Python's own ``input``.

        Raises
        ------
        InputRefusedError
            There is no user to ask, or several ranks asked at the same time.  It is an `EOFError`.
        """
        return self._ask(str(prompt), secret=False)

    def getpass(self, prompt: str = "Password: ", stream: object = None, **_: Any) -> str:
        """Ask without showing what is typed; as ``getpass.getpass``."""
        return self._ask(str(prompt), secret=True)

    def _ask(self, prompt: str, *, secret: bool) -> str:
        if threading.current_thread() is not threading.main_thread():
            raise InputRefusedError("input() works in a cell's own thread only, not in one that it started")
        request = InputRequest(self._output.task, next(self._serials), prompt, secret)
        self._output.settle()  # what was printed before the question is shown before it
        self._channel.send(Kind.INPUT, pickle_message(request), sequence=request.serial)
        reply = self._reply(request.serial)
        if reply.refusal:
            raise InputRefusedError(reply.refusal)
        return reply.text

    def _reply(self, serial: int) -> InputReply:
        while True:
            frame = self._channel.receive()  # in slices: an interrupt raises
            assert frame is not None, "there was no time-out"
            if frame.kind is not Kind.INPUT:
                self.deferred.append(frame)
                if frame.kind is Kind.EXIT:
                    raise InputRefusedError("the session is being stopped")
                continue
            reply = pickle.loads(frame.payload)
            assert isinstance(reply, InputReply)
            if reply.serial == serial:
                return reply
