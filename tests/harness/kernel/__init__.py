"""A real Jupyter kernel for tests: runs cells, keeps every message with its time, interrupts, kills.

Some facts about kernels (jupyter_client's documentation, "Messaging"):

* a cell is over when its ``idle`` status came on iopub *and* its reply on shell, in either order;
* output that arrives with another cell's parent header lands in that other cell: so the parent of every
  message is kept;
* `KernelManager` signals the kernel's whole process group;
* connections are files under a short temporary folder (``ipc``): no port, and no two kernels collide.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import zmq
import zmq.asyncio
from jupyter_client.kernelspec import KernelSpecManager
from jupyter_client.manager import AsyncKernelManager
from jupyter_client.session import Session as Wire

from nbparallel.testing import processes
from nbparallel.testing.processes import ProcessRecord
from tests.harness.kernel.kernel_messages import CellOutcome, KernelMessage

START_SECONDS = 30.0
"""A kernel that has not answered by then will not; starting takes about one second."""
CELL_SECONDS = 15.0
"""A cell that takes longer hangs, unless the test said so."""
SLICE_SECONDS = 0.05
"""Between two looks whether the kernel still lives."""
POLL_SECONDS = 0.005
"""Between two looks whether a kernel that was asked to leave is gone; arbitrary."""
RESET = """
_shell = get_ipython()
if "nbparallel" in _shell.extension_manager.loaded:
    _shell.run_line_magic("parallel_stop", "")
    _shell.run_line_magic("unload_ext", "nbparallel")
_shell.config.pop("NbParallel", None)
_shell.run_line_magic("reset", "-f")
"""
_T = TypeVar("_T")


class RunningCell:
    """A cell that was sent; `wait` for its end, or for something that it prints."""

    def __init__(self, kernel: Kernel, message_id: str, started: float) -> None:
        self._kernel = kernel
        self.message_id = message_id
        self.started = started

    @property
    def messages(self) -> tuple[KernelMessage, ...]:
        """What arrived so far."""
        return self._kernel.messages_of(self.message_id)

    def wait_for(self, text: str, timeout: float = CELL_SECONDS) -> None:
        """Wait until the cell's streams hold `text`."""

        def there() -> bool:
            return text in "".join(m.printed for m in self.messages)

        self._kernel.wait_until(there, timeout, f"output of the cell that holds {text!r}")

    def wait(self, timeout: float = CELL_SECONDS) -> CellOutcome:
        """Wait until the cell is over, however it ends."""
        return self._kernel.outcome(self, timeout)


class Kernel:
    """A kernel process with folders of its own; a context manager.

    Parameters
    ----------
    path : sequence of path
        Folders that come first on the kernel's ``sys.path``: for another ipykernel, installed with
        ``pip install --target FOLDER --no-deps ipykernel==…``.
    env : mapping
        Environment variables on top of this process's.
    cwd : path, optional
        The kernel's working directory; by default a temporary one.

    Notes
    -----
    One thread at a time.  A reader thread takes iopub, so that times are those of arrival.
    Every wait is bounded and raises `TimeoutError` with what the kernel said so far.
    """

    def __init__(
        self,
        *,
        path: Sequence[Path | str] = (),
        env: Mapping[str, str] | None = None,
        cwd: Path | str | None = None,
    ) -> None:
        self._path = [str(folder) for folder in path]
        self._extra = dict(env or {})
        self._cwd = cwd
        self._arrived = threading.Condition()
        self._messages: list[KernelMessage] = []
        self._asked: dict[str, Any] = {}
        self._stopping = threading.Event()
        self._cleanup = contextlib.ExitStack()

    def start(self) -> Self:
        """Start the process and wait until it answers on both channels."""
        cleanup = self._cleanup
        self._folder = Path(tempfile.mkdtemp(prefix="nbp-k-"))
        cleanup.callback(shutil.rmtree, self._folder, ignore_errors=True)
        self._log = cleanup.enter_context((self._folder / "log").open("w+"))
        self._loop = asyncio.new_event_loop()
        cleanup.callback(self._loop.close)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        cleanup.callback(self._context.destroy, linger=0)
        self._manager = self._make_manager()
        cleanup.callback(self._shut_down)
        self._await(
            self._manager.start_kernel(
                env=self._environment(),
                cwd=str(self._cwd or self._folder),
                stdout=self._log,
                stderr=self._log,
            )
        )
        # connects at any time, a test would seem to have opened it; the shutdown opens it again
        self._manager._close_control_socket()
        self._shell = self._connect(self._manager.shell_port, zmq.DEALER)
        self._stdin = self._connect(self._manager.stdin_port, zmq.DEALER, immediate=True)
        self._iopub = self._connect(self._manager.iopub_port, zmq.SUB)
        self._iopub.subscribe(b"")
        self._wire = Wire(key=self._manager.session.key)
        reader = threading.Thread(target=self._read, name="kernel-iopub", daemon=True)
        reader.start()
        cleanup.callback(reader.join, START_SECONDS)
        cleanup.callback(self._stopping.set)
        self._wait_until_ready()
        return self

    def _make_manager(self) -> AsyncKernelManager:
        # a kernel spec of our own: one in the user's folders would be preferred to the installed kernel
        spec = self._folder / "kernels" / "ground"
        spec.mkdir(parents=True)
        launch = [
            sys.executable,
            "-Xfrozen_modules=off",
            "-m",
            "ipykernel_launcher",
            "-f",
            "{connection_file}",
        ]
        (spec / "kernel.json").write_text(
            json.dumps({"argv": launch, "display_name": "ground", "language": "python"})
        )
        return AsyncKernelManager(
            kernel_name="ground",
            kernel_spec_manager=KernelSpecManager(kernel_dirs=[str(spec.parent)], ensure_native_kernel=False),
            context=zmq.asyncio.Context(shadow=self._context),
            connection_file=str(self._folder / "connection.json"),
            transport="ipc",
            ip=str(self._folder / "c"),
        )

    def _shut_down(self) -> None:
        if self._manager.has_kernel:
            self._await(self._leave())
        # a killed kernel leaves the manager's own socket open, and the context would wait for it forever
        self._await(self._manager.cleanup_resources())

    async def _leave(self) -> None:
        # as `shutdown_kernel` does, which looks only ten times a second whether the process is gone
        await self._manager.interrupt_kernel()
        await self._manager.request_shutdown()
        await self._manager.finish_shutdown(pollinterval=POLL_SECONDS)

    def _connect(self, port: int, kind: int, *, immediate: bool = False) -> zmq.Socket[bytes]:
        sock = self._context.socket(kind)
        sock.immediate = immediate  # it can be written to once it is connected, not before
        if kind == zmq.DEALER:
            sock.identity = b"ground"  # a kernel asks for input at the identity that sent the cell
        sock.connect(f"ipc://{self._manager.ip}-{port}")
        return sock

    def _environment(self) -> dict[str, str]:
        environment = {**os.environ}
        for name in ("JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR", "IPYTHONDIR"):
            environment[name] = str(self._folder / name.lower())
        if self._path:
            environment["PYTHONPATH"] = os.pathsep.join([*self._path, environment.get("PYTHONPATH", "")])
        return {**environment, **self._extra}

    def _await(self, doing: Awaitable[_T]) -> _T:
        return self._loop.run_until_complete(asyncio.wait_for(doing, START_SECONDS))

    def _read(self) -> None:
        wire = Wire(key=self._manager.session.key)
        while not self._stopping.is_set():
            if not self._iopub.poll(int(SLICE_SECONDS * 1000)):
                continue
            _, message = wire.recv(self._iopub, mode=zmq.NOBLOCK)
            if message is None:
                continue
            parent = message["parent_header"].get("msg_id", "")
            kept = KernelMessage(time.monotonic(), message["msg_type"], parent, message["content"])
            with self._arrived:
                self._messages.append(kept)
                self._arrived.notify_all()

    def _wait_until_ready(self) -> None:
        # asked again and again: a subscription to iopub takes a moment, and what was said before is lost
        deadline = time.monotonic() + START_SECONDS
        while True:
            asked = self._send("kernel_info_request", {})
            reply = self._reply(asked, 0.5)
            with self._arrived:
                if reply is not None and not self._idle(asked):
                    self._arrived.wait(0.5)
            if reply is not None and self._idle(asked):
                break
            if time.monotonic() > deadline or not self.alive:
                raise TimeoutError(f"the kernel did not answer within {START_SECONDS} s:\n{self.log()}")
        # stdin tries again every 100 ms: a test that begins before that would seem to have opened its socket
        if not self._stdin.poll(int(START_SECONDS * 1000), zmq.POLLOUT):
            raise TimeoutError(f"the kernel took no stdin within {START_SECONDS} s:\n{self.log()}")

    def _send(self, kind: str, content: dict[str, Any]) -> str:
        message = self._wire.msg(kind, content)
        self._wire.send(self._shell, message)
        return str(message["header"]["msg_id"])

    def _reply(self, message_id: str, seconds: float) -> dict[str, Any] | None:
        deadline = time.monotonic() + seconds
        while self._shell.poll(max(0, int((deadline - time.monotonic()) * 1000))):
            _, message = self._wire.recv(self._shell, mode=zmq.NOBLOCK)
            if message is not None and message["parent_header"].get("msg_id") == message_id:
                content: dict[str, Any] = message["content"]
                return content
        return None

    def _idle(self, message_id: str) -> bool:
        return any(
            m.kind == "status" and m.content["execution_state"] == "idle"
            for m in self.messages_of(message_id)
        )

    @property
    def pid(self) -> int:
        """The kernel's process number."""
        pid: int = self._manager.provisioner.pid  # type: ignore[union-attr]  # there is one once started
        return pid

    @property
    def alive(self) -> bool:
        """Whether the kernel's process runs."""
        return bool(self._await(self._manager.is_alive()))

    @property
    def messages(self) -> tuple[KernelMessage, ...]:
        """Everything that arrived on iopub, of all cells."""
        with self._arrived:
            return tuple(self._messages)

    def messages_of(self, message_id: str) -> tuple[KernelMessage, ...]:
        """Return what arrived with this parent."""
        return tuple(message for message in self.messages if message.parent == message_id)

    def log(self) -> str:
        """Return what the process itself wrote on its descriptors 1 and 2."""
        return (self._folder / "log").read_text(errors="replace")

    def descendants(self) -> list[ProcessRecord]:
        """Return every process below the kernel: supervisor, template, ranks."""
        return list(processes.family(self.pid))

    def begin(self, code: str, *, allow_stdin: bool = False) -> RunningCell:
        """Send a cell and return immediately; with `allow_stdin` it may ask (`question`, `answer`)."""
        started = time.monotonic()
        content = {
            "code": code,
            "silent": False,
            "store_history": True,
            "user_expressions": {},
            "allow_stdin": allow_stdin,
            # with True ipykernel aborts whatever arrives in the moment after a failed cell: the next one here
            "stop_on_error": False,
        }
        return RunningCell(self, self._send("execute_request", content), started)

    def question(self, timeout: float = CELL_SECONDS) -> tuple[str, bool]:
        """Wait until a cell asks for input; return the prompt and whether the answer is secret."""
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            if not self._stdin.poll(int(SLICE_SECONDS * 1000)):
                continue
            _, message = self._wire.recv(self._stdin, mode=zmq.NOBLOCK)
            if message is not None and message["msg_type"] == "input_request":
                self._asked = message
                return message["content"]["prompt"], message["content"]["password"]
        raise TimeoutError(f"no question within {timeout:g} s; the process wrote: …{self.log()[-2000:]}")

    def answer(self, text: str) -> None:
        """Answer the last question."""
        self._wire.send(self._stdin, "input_reply", {"value": text}, parent=self._asked)

    def run(self, code: str, timeout: float = CELL_SECONDS) -> CellOutcome:
        """Run a cell to its end."""
        return self.begin(code).wait(timeout)

    def reset(self) -> None:
        """Stop ranks, unload the extension, delete variables and messages: as good as a new kernel."""
        outcome = self.run(RESET)
        if outcome.status != "ok":
            raise RuntimeError(f"the kernel cannot be used again: {outcome.traceback}")
        self.wait_until(lambda: not self.descendants(), CELL_SECONDS, "end of the kernel's processes")
        with self._arrived:
            self._messages.clear()

    def outcome(self, cell: RunningCell, timeout: float) -> CellOutcome:
        """Wait for the end of `cell`; `RunningCell.wait` calls this."""
        deadline = time.monotonic() + timeout

        def over() -> bool:
            return self._idle(cell.message_id) or not self.alive

        self.wait_until(over, timeout, "the end of the cell")
        reply = self._reply(cell.message_id, max(0.1, deadline - time.monotonic()) if self.alive else 0.1)
        messages = cell.messages
        end = next((m.seconds for m in reversed(messages)), time.monotonic())
        error = next((m.content for m in messages if m.kind == "error"), {})
        content = reply or {}
        return CellOutcome(
            status=content.get("status", "died"),
            messages=messages,
            started=cell.started,
            seconds=end - cell.started,
            execution_count=content.get("execution_count"),
            ename=error.get("ename", content.get("ename", "")),
            evalue=error.get("evalue", content.get("evalue", "")),
            traceback="\n".join(error.get("traceback", ())),
        )

    def wait_until(self, condition: Callable[[], bool], timeout: float, what: str) -> None:
        """Wait until `condition` holds; it is asked when a message arrives, and in between."""
        deadline = time.monotonic() + timeout
        while not condition():
            if time.monotonic() > deadline:
                said = "".join(m.content.get("text", "") for m in self.messages if m.kind == "stream")
                raise TimeoutError(
                    f"no {what} within {timeout:g} s\ncells printed: …{said[-2000:]}\n"
                    f"the process wrote: …{self.log()[-2000:]}"
                )
            with self._arrived:
                self._arrived.wait(SLICE_SECONDS)

    def interrupt(self) -> None:
        """Interrupt the kernel as a front end does: SIGINT to its process group."""
        self._await(self._manager.interrupt_kernel())

    def kill(self, *, group: bool = False) -> None:
        """Kill the process (with `group` its process group, as Jupyter does) and wait until it is gone."""
        pid = self.pid
        (os.killpg if group else os.kill)(pid, signal.SIGKILL)
        self._await(self._manager.provisioner.wait())  # type: ignore[union-attr]  # see pid

    def restart(self, *, now: bool = False) -> None:
        """Restart the process as a front end does; `now` kills it without a goodbye."""
        self._await(self._manager.restart_kernel(now=now))
        self._wait_until_ready()

    def stop(self) -> None:
        """End the process, threads and sockets (idempotent)."""
        self._cleanup.close()

    def __enter__(self) -> Self:
        try:
            return self.start()
        except BaseException:
            self.stop()
            raise

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
