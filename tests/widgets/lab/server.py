"""A JupyterLab server for tests: a process with a port, a token and folders of its own."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import urllib.request
from pathlib import Path
from typing import Any, Self

import nbformat

from nbparallel.testing import processes
from nbparallel.testing.waiting import wait_until

START_SECONDS = 60.0
"""A server that does not listen by then will not; starting takes about three seconds."""
REPLY_SECONDS = 15.0
"""Ending a kernel with its ranks takes less than two."""
KERNEL = "ground"
_OWN_FOLDERS = {
    "JUPYTER_CONFIG_DIR": "config",
    "JUPYTER_DATA_DIR": "data",
    "JUPYTER_RUNTIME_DIR": "runtime",
    "JUPYTERLAB_SETTINGS_DIR": "settings",
    "JUPYTERLAB_WORKSPACES_DIR": "workspaces",
    "IPYTHONDIR": "ipython",
}


class LabServer:
    """A JupyterLab that listens on this machine only, and asks nothing elsewhere; a context manager."""

    def __init__(self) -> None:
        self._token = secrets.token_hex(16)
        self._cleanup = contextlib.ExitStack()
        self.url = ""
        """Where it listens, without a slash at the end."""

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as undo:
            undo.callback(self._cleanup.close)
            self._start()
            undo.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._cleanup.close()

    def _start(self) -> None:
        cleanup = self._cleanup
        self._folder = Path(tempfile.mkdtemp(prefix="nbp-lab-"))
        cleanup.callback(shutil.rmtree, self._folder, ignore_errors=True)
        self.notebooks = self._folder / "notebooks"
        self.notebooks.mkdir()
        self._write_kernel_spec()
        self._silence()
        self._log = cleanup.enter_context((self._folder / "log").open("w+"))
        environment = {**os.environ, "JUPYTER_TOKEN": self._token}
        environment |= {name: str(self._folder / folder) for name, folder in _OWN_FOLDERS.items()}
        self._process = subprocess.Popen(
            [
                sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", "--expose-app-in-browser",
                "--ServerApp.ip=127.0.0.1", "--ServerApp.port=0", f"--ServerApp.root_dir={self.notebooks}",
                "--LabApp.news_url=None", "--LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate",
            ],
            env=environment, cwd=self._folder, stdin=subprocess.DEVNULL, stdout=self._log, stderr=self._log,
        )  # fmt: skip
        cleanup.callback(self._stop)
        described = self._folder / "runtime" / f"jpserver-{self._process.pid}.json"

        def listens() -> bool:
            if self._process.poll() is not None:
                raise RuntimeError(f"JupyterLab ended with {self._process.returncode}:\n{self.log()}")
            with contextlib.suppress(OSError, ValueError):  # not there yet, or half of it
                self.url = json.loads(described.read_text())["url"].rstrip("/")
            return bool(self.url)

        wait_until(listens, self.log, seconds=START_SECONDS)

    def _silence(self) -> None:
        # else a question about news lies over what a picture shows
        settings = self._folder / "settings" / "@jupyterlab" / "apputils-extension"
        settings.mkdir(parents=True)
        quiet = {"fetchNews": "false", "checkForUpdates": False, "doNotDisturbMode": True}
        (settings / "notification.jupyterlab-settings").write_text(json.dumps(quiet))

    def _write_kernel_spec(self) -> None:
        # of our own: one in the user's folders would be preferred to the installed kernel
        spec = self._folder / "data" / "kernels" / KERNEL
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
            json.dumps({"argv": launch, "display_name": "Python", "language": "python"})
        )

    def _stop(self) -> None:
        below = list(processes.family(self._process.pid))
        self._process.terminate()
        try:
            self._process.wait(REPLY_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        processes.kill(below)

    def log(self) -> str:
        """Return what the server and its kernels wrote on their descriptors 1 and 2."""
        return (self._folder / "log").read_text(errors="replace")

    def address(self, notebook: str) -> str:
        """Return the address of a notebook, alone on its page."""
        return f"{self.url}/doc/tree/{notebook}?token={self._token}"

    def write(self, name: str, *sources: str) -> None:
        """Write a notebook with these cells, which have not run."""
        notebook = nbformat.v4.new_notebook(
            cells=[nbformat.v4.new_code_cell(source) for source in sources],
            metadata={"kernelspec": {"name": KERNEL, "display_name": "Python", "language": "python"}},
        )
        nbformat.write(notebook, self.notebooks / name)

    def read(self, name: str) -> Any:
        """Return a notebook as it was saved last."""
        return nbformat.read(self.notebooks / name, as_version=4)

    def end_kernels(self) -> None:
        """End every kernel as the menu does; fails if a process of one is left."""
        for session in self._request("GET", "/api/sessions"):
            self._request("DELETE", f"/api/sessions/{session['id']}")
        wait_until(
            lambda: not list(processes.family(self._process.pid)),
            lambda: list(map(str, processes.family(self._process.pid))),
            seconds=REPLY_SECONDS,
        )

    def reset(self) -> None:
        """Remove notebooks, and settings as the theme that a test has chosen."""
        for name in ("notebooks", "settings", "workspaces"):
            shutil.rmtree(self._folder / name, ignore_errors=True)
        self.notebooks.mkdir()

    def distrust(self, name: str) -> None:
        """Change a notebook's metadata: it is another one than was run here, and not trusted any more."""
        notebook = self.read(name)
        notebook.metadata["changed"] = True
        nbformat.write(notebook, self.notebooks / name)

    def _request(self, method: str, path: str) -> Any:
        request = urllib.request.Request(
            self.url + path, method=method, headers={"Authorization": f"token {self._token}"}
        )
        with urllib.request.urlopen(request, timeout=REPLY_SECONDS) as reply:
            text = reply.read()
        return json.loads(text) if text else None
