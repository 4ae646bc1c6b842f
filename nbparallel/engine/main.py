"""A rank process from start to exit: connections, main loop.

`serve` runs in a process that the template forked (or that the supervisor started afresh); it never
returns.  The loop waits for frames of the kernel; a task runs in the main thread, as in a notebook.
"""

from __future__ import annotations

import builtins
import contextlib
import faulthandler
import gc
import getpass
import itertools
import os
import pickle
import select
import signal
import sys
import threading
import time
from collections import deque
from dataclasses import replace
from functools import partial
from types import ModuleType
from typing import Any, NoReturn

from IPython.core.completer import provisionalcompleter

import nbparallel
from nbparallel import distributed, sharing
from nbparallel.channel import Channel
from nbparallel.channel.channel import SegmentClient
from nbparallel.distributed.api.operation_base import PREDEFINED
from nbparallel.distributed.communicator import Communicator
from nbparallel.engine import environment, failures, shell as shells, tasks
from nbparallel.engine.debugger import Breakpoints, FailureFrames
from nbparallel.engine.interrupts import Interrupts
from nbparallel.engine.namespace import RankNames
from nbparallel.engine.output import RankOutput, mark_threads, pickle_message
from nbparallel.engine.rank_state import RankState
from nbparallel.engine.shell import RankShell
from nbparallel.errors import ChannelClosedError, InputRefusedError, label_of_rank
from nbparallel.errors.questions import class_name, text_of
from nbparallel.sharing.strategies.strategy import process_names
from nbparallel.supervisor.children import die_with_parent
from nbparallel.transfer import definitions
from nbparallel.transfer.variable_info import describe_variable
from nbparallel.wire.control import ControlView
from nbparallel.wire.control_layout import ITEMS
from nbparallel.wire.frames import Frame, Kind
from nbparallel.wire.identity import pack_versions
from nbparallel.wire.inspection import Completion, CompletionRequest, Completions, NamespaceReport, Origin
from nbparallel.wire.messages import (
    Configure,
    InputReply,
    InputRequest,
    JoinWorld,
    Task,
    runs_user_code,
)
from nbparallel.wire.segments import Announce
from nbparallel.wire.system import IMPORT_HOOKS, ImportHook, ready

# The engine of a rank: frames of the kernel in, tasks run, outcomes out.

# Reports about an idle rank's namespace: its variables, and completions.

LOOK_SECONDS = 0.3
"""For so long contents are compared; what is left is not known.  The asker waits for a second."""
MOST_NAMES = 1000
"""Variables that are reported, at most; arbitrary."""


def inspect_namespace(state: RankState, number: int) -> NamespaceReport:
    """Return the user's variables of this rank, described; never raises.

    Copies are pickled, to see whether they have changed: as long as a cell that sends them anew would do.
    """
    try:
        store, values = (
            sharing.current_store(),
            state.variables.copy(),
        )  # a thread may assign at the same time
        names = [
            name
            for name in state.defaults.user_names()
            if name in values and not issubclass(type(values[name]), ModuleType)
        ]
        until = time.monotonic() + LOOK_SECONDS
        reported = [
            describe_variable(name, values[name], store, state.names.origin(name))
            for name in names[:MOST_NAMES]
        ]
        reported = [
            replace(info, as_delivered=state.names.is_as_delivered(info.name))
            if info.origin is Origin.COPIED and time.monotonic() < until
            else info
            for info in reported
        ]
        return NamespaceReport(number, tuple(reported), len(names) - len(reported))
    except BaseException as error:  # noqa: BLE001  a question must not end the rank
        return NamespaceReport(number, (), 0, f"{class_name(error)}: {text_of(error)}")


MOST_COMPLETIONS = 300
"""Completions that are returned, at most; arbitrary."""


def complete(state: RankState, request: CompletionRequest) -> Completions:
    """Return what this rank's own shell would offer; never raises, changes no variable."""
    try:
        completer = state.shell.Completer
        completer.use_jedi = False  # it takes seconds the first time, and analyses source, not values
        with provisionalcompleter():
            offered = completer.completions(request.text, request.cursor)
            found = tuple(
                Completion(c.start, c.text, "" if c.type == "<unknown>" else str(c.type or ""))
                for c in itertools.islice(offered, MOST_COMPLETIONS)
            )
    except BaseException:  # noqa: BLE001  it runs the user's __dir__; a key press must not end the rank
        found = ()
    return Completions(request.number, found)


# ``input()`` and ``getpass`` on a rank, answered by the notebook's user.


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
            reply: InputReply = pickle.loads(frame.payload)
            if reply.serial == serial:
                return reply


MOST_STEPS = 2**63 - 1
"""What a word of a bar holds."""
MANY_MODULES = 100
"""A cell that has imported so many leaves enough objects that a full collection is due soon; arbitrary."""


class Engine:
    """The rank's side of a session: handles the kernel's frames one after the other.

    Attributes
    ----------
    state : RankState
        What stays from task to task.
    input_requests : InputRequests
        ``input()`` on this rank.
    """

    def __init__(
        self, channel: Channel, broker: SegmentClient, configure: Configure, shell: RankShell
    ) -> None:
        self._channel = channel
        output = RankOutput(channel)
        mark_threads(output)
        self.input_requests = InputRequests(channel, output)
        self.input_requests.install()
        breakpoints = Breakpoints(self.input_requests.input)
        breakpoints.install()
        frames = FailureFrames(self.input_requests.input, shell.user_ns)
        frames.install()
        os.register_at_fork(before=output.flush)  # else a child would write the same text again
        environment.set_environment(configure)
        self._threads = environment.ThreadLimits(configure.usable_cpus, len(configure.place.ranks))
        settings = environment.FollowedSettings()
        shell.attach(output, configure.colors)
        shell.debugger = frames.examine_last  # type: ignore[method-assign]
        shell.text_of_error = partial(failures.shown_text, shell=shell)
        interrupts = Interrupts(configure.rank)
        interrupts.install()
        defaults = environment.Defaults(shell.user_ns, shell.user_ns_hidden)
        defaults.set(
            rank=configure.rank,
            world_size=configure.place.world_size,
            rng=environment.random_streams(configure.seed, configure.rank),
            nbp=nbparallel,
            dist=distributed,
            **{name: getattr(distributed, name) for name in PREDEFINED},
        )
        self.state = RankState(
            rank=configure.rank,
            configure=configure,
            shell=shell,
            variables=shell.user_ns,
            output=output,
            broker=broker,
            interrupts=interrupts,
            breakpoints=breakpoints,
            frames=frames,
            defaults=defaults,
            names=RankNames(shell.user_ns, sharing.current_store(), defaults=defaults.values),
            context=configure.context,
            next_context=configure.context,
            settings=settings,
        )
        settings.begin(configure.context.settings)
        ImportHook("tqdm.std", self._follow_bars).install()
        definitions.set_main_globals(shell.user_ns, shell.user_ns_hidden)
        self._keepalive: object = None
        self._port = 0

    def _follow_bars(self) -> None:
        """Have the kernel see how far the outermost bar of tqdm is, whenever it is drawn."""
        std: Any = sys.modules["tqdm.std"]
        draw = std.tqdm.display

        def display(bar: Any, *args: Any, **options: Any) -> Any:
            control, task = self.state.control, self.state.output.task
            if control is not None and not bar.pos and bar.total and self.state.output.runs:
                first = control.layout.rank_word(self.state.rank, ITEMS)
                since = bar.format_dict["elapsed"]
                if control.words[first] != task or control.words[first + 4]:  # no map has these words
                    with contextlib.suppress(
                        ArithmeticError, TypeError, ValueError
                    ):  # the bar has its own numbers
                        done, total = (min(max(0, int(number)), MOST_STEPS) for number in (bar.n, bar.total))
                        steps = 0, done, time.monotonic_ns() - int(1e9 * since), total
                        for word, value in enumerate(steps, first + 1):
                            control.words[word] = value
                        control.words[first] = task
            return draw(bar, *args, **options)

        std.tqdm.display = display

    def handle(self, frame: Frame) -> None:
        """Handle one frame of the kernel."""
        if frame.kind is Kind.STRATEGY:
            self.state.strategy_choice = pickle.loads(frame.payload)
            return
        if frame.kind is Kind.WORKING_CONTEXT:
            self.state.next_context = pickle.loads(frame.payload)
            return
        if frame.kind is Kind.INSPECT:  # may come from another thread, while the last value is being taken
            self._channel.send(
                Kind.REPORT, pickle_message(inspect_namespace(self.state, pickle.loads(frame.payload)))
            )
            return
        if frame.kind is Kind.COMPLETE:
            self._channel.send(Kind.REPORT, pickle_message(complete(self.state, pickle.loads(frame.payload))))
            return
        if frame.kind is Kind.SETTLE_MESSAGES:  # of this epoch: a new one would have been joined before
            if self.state.communicator is not None:
                self.state.communicator.settle(pickle.loads(frame.payload))
            return
        if frame.kind is Kind.INPUT:
            return  # the answer to a question that an interrupt has ended
        self._keepalive = None  # the kernel has taken the last value, before it sends this frame
        if frame.kind is Kind.JOIN_EPOCH:
            self._join(pickle.loads(frame.payload), frame)
        else:
            self._run(pickle.loads(frame.payload), frame.fds)

    def reclaim_memory(self) -> None:
        """Take back memory that other processes have released."""
        self._release_unused()
        sharing.current_store().drain()

    def _release_unused(self) -> None:
        if self.state.communicator is not None:
            self.state.communicator.release()
        self.state.names.release_unbound()

    def release_idle_memory(self) -> float | None:
        """Unmap memory that has been idle for long; return when to do so again, in milliseconds."""
        self.state.frames.release_ours()
        seconds = sharing.current_store().tend()
        return None if seconds is None else 1000 * seconds + 1

    def _join(self, join: JoinWorld, frame: Frame) -> None:
        state = self.state
        if state.communicator is not None:
            state.communicator.close()
        if state.control is not None:
            state.control.close()
        view = state.control = ControlView(frame.fds[0])
        place = join.place
        label_of_rank.set(place.label_of)
        state.interrupts.words = view
        state.communicator = Communicator(
            view,
            state.rank,
            place.world_size,
            sharing.current_store(),
            epoch=join.epoch,
            usable_cpus=state.configure.usable_cpus,
            place=place,
        )
        state.communicator.record()
        distributed.set_current(state.communicator)
        self._port = environment.resize_environment(place, self._port, join.free_port)
        self._threads.resize(len(place.ranks))
        state.defaults.set(world_size=place.world_size)

    def _run(self, task: Task, fds: list[int]) -> None:
        output = self.state.output
        output.task, output.runs = task.number, runs_user_code(task)
        modules = len(sys.modules)
        outcome, self._keepalive = tasks.run_task(self.state, task, fds)
        if len(sys.modules) >= modules + MANY_MODULES and gc.isenabled():
            gc.collect()  # now: in a later cell it would delay this rank, and the ranks that wait for it
        output.runs = False
        output.settle()
        self._channel.send(Kind.OUTCOME, pickle_message(outcome), sequence=outcome.number)
        if not outcome.ok:
            gc.collect()  # what formatted the traceback refers to itself, and to frames with their arrays
        self._release_unused()  # `release_idle_memory` follows every frame, and drains


def prepare() -> None:
    """Create the shell and import what every rank needs; the template calls this once, before any fork."""
    import cloudpickle  # noqa: F401  imported here so that no rank has to
    import IPython.core.logger  # noqa: F401
    import numpy.random  # noqa: F401

    environment.find_blas()
    for hook in IMPORT_HOOKS:
        hook.install()
    ImportHook("tqdm.notebook", _draw_bars_as_text).install()
    shells.make().transform_cell("pass")  # compiles Python's and IPython's regular expressions


def _draw_bars_as_text() -> None:
    """Have tqdm's bars for notebooks be text: a widget of a rank is dead, and its text is its first state."""
    notebook: Any = sys.modules["tqdm.notebook"]
    std: Any = sys.modules["tqdm.std"]

    class TextBar(std.tqdm):  # which takes no `display`
        def __init__(self, *args: Any, display: bool = True, **options: Any) -> None:
            super().__init__(*args, **options)

    notebook.tqdm = notebook.tqdm_notebook = TextBar
    notebook.trange = notebook.tnrange = lambda *args, **options: TextBar(range(*args), **options)


def spawned(channel: int, segments: int, client: int, supervisor: int) -> NoReturn:
    """Enter a rank that was started as a fresh interpreter (``start_method="spawn"``)."""
    die_with_parent(supervisor)
    for fd in (channel, segments):
        os.set_inheritable(fd, False)
    prepare()
    _run(channel, segments, client)


def serve(channel: int, stdout: int, stderr: int, segments: int, *, client: int) -> NoReturn:
    """Enter a rank that was forked from the template."""
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(stdout, 1)
    os.dup2(stderr, 2)
    for fd in (null, stdout, stderr):
        os.close(fd)
    _run(channel, segments, client)


def _run(channel_fd: int, segments_fd: int, client: int) -> NoReturn:
    code = 1
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # until the engine's own handler is there
        faulthandler.enable(file=2)
        _prefer_for_oom_kill()
        channel, segments = Channel.from_fd(channel_fd), Channel.from_fd(segments_fd)
        segments.send(Kind.ANNOUNCE, Announce(os.getpid()).pack())
        configure = _configure(channel)
        process_names.notebook = configure.notebook
        broker = SegmentClient(segments, client=client)
        store = sharing.Store(client)
        store.connect(broker)
        sharing.set_current_store(store)
        engine = Engine(channel, broker, configure, RankShell.instance())
        channel.send(Kind.RANK_READY, pack_versions())
        _loop(channel, engine)
        code = 0
    except ChannelClosedError:
        code = 0  # the kernel is gone; the supervisor ends this rank anyway
    finally:
        # a rank leaves by _exit only: exit handlers belong to the template or to the user's libraries
        try:
            if code:
                sys.excepthook(*sys.exc_info())
            sys.stdout.flush()
            sys.stderr.flush()
            _remove_semaphores()
            _remove_folder()
        finally:
            os._exit(code)


def _remove_semaphores() -> None:
    """Remove the names of semaphores that multiprocessing has made here: its tracker would report them."""
    library: Any = sys.modules.get("multiprocessing.synchronize")
    for last_step in [] if library is None else list(library.util._finalizer_registry.values()):
        if last_step._callback is library.SemLock._cleanup:  # as of tqdm's lock, from 3.14 on
            last_step()


def _remove_folder() -> None:
    """Remove the temporary folder that multiprocessing, if used, has made for sockets: its last step."""
    library = sys.modules.get("multiprocessing.process")
    folder = None if library is None else library.current_process()._config.get("tempdir")
    if folder:
        import shutil

        shutil.rmtree(folder, ignore_errors=True)


def _configure(channel: Channel) -> Configure:
    select.select([channel], [], [])
    frame = channel.receive()
    assert frame is not None, "there was no time-out"
    configure: Configure = pickle.loads(frame.payload)
    return configure


def _loop(channel: Channel, engine: Engine) -> None:
    poll = select.poll()
    poll.register(channel, select.POLLIN)
    segments = engine.state.broker.fileno()
    poll.register(segments, select.POLLIN)
    deferred = engine.input_requests.deferred
    due: float | None = None  # without a time-out an idle rank uses no CPU; its end comes by signal
    while True:
        if not deferred:
            for fd, events in ready(poll, due):
                if fd == segments and events & select.POLLHUP:
                    poll.unregister(fd)  # the supervisor is gone, and this rank is about to be killed
                elif fd == segments:
                    engine.reclaim_memory()  # another process released memory that this rank allocated
        frame = deferred.popleft() if deferred else channel.receive_nowait()
        if frame is not None:
            try:
                if frame.kind is Kind.EXIT:
                    return
                engine.handle(frame)
            finally:
                frame.close()
        due = engine.release_idle_memory()


def _prefer_for_oom_kill() -> None:
    """Make the out-of-memory killer prefer a rank to the notebook (proc(5), oom_score_adj)."""
    # not Linux, or not allowed: then the system decides
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("500")
