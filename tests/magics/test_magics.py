"""The magics in a shell: what they ask the session for, and how mistakes read."""

from __future__ import annotations

import os
import pickle
import re
import signal
import threading
from typing import Any

import pytest

import nbparallel_magics
from nbparallel.errors import CellTimeoutError, NbParallelError, StartError
from nbparallel.session.tasks import parallel_error
from nbparallel.sharing.strategies.file_descriptor import FileDescriptorStrategy
from nbparallel.testing.strategies import temporary_registry
from nbparallel.wire.messages import Cause, FrameLine, RankFailure
from nbparallel_magics.completion import parsers


def hello(sink: Any, call: Any) -> dict[int, int]:
    """Print on every rank."""
    for rank in call.ranks or range(4) if sink else ():
        sink.stream(rank, "stdout", f"hello from {rank}\n")
        sink.result(rank, {"text/plain": "7"}, {})
    return {0: 7}


def test_a_cell_runs_on_ranks(notebook: Any) -> None:
    """`%%parallel -n 4` makes a session of four, and shows what they print and their values under labels."""
    notebook.play(hello)
    out = notebook.run("%%parallel -n 4\nprint('hello')\n7")
    assert out.error is None
    assert out.stdout == (
        "[rank 0] hello from 0\n[rank 1] hello from 1\n[rank 2] hello from 2\n[rank 3] hello from 3\n"
        "Out[ranks 0-3]: 7\n"
    )
    call = notebook.session.calls[0]
    assert notebook.session.world_size == 4
    assert (call.source, call.line_offset, call.ranks, call.share) == ("print('hello')\n7\n", 1, None, ())
    assert call.namespace is notebook.shell.user_ns


def test_flags_reach_the_session(notebook: Any) -> None:
    """Every flag arrives as what it means; none of them stays for the next cell."""
    notebook.play(hello)
    notebook.run("%%parallel -n 4 -r -1,0 -o parts --share a,b --timeout 2.5 --seed 7\nx")
    call = notebook.session.calls[-1]
    assert (call.ranks, call.share, call.timeout, call.seed) == ((0, 3), ("a", "b"), 2.5, 7)
    assert call.want_values
    assert notebook.shell.user_ns["parts"] == {0: 7}
    notebook.run("%%parallel\nx")
    call = notebook.session.calls[-1]
    assert (call.ranks, call.share, call.timeout, call.seed, call.want_values) == (
        None,
        (),
        None,
        None,
        False,
    )


def test_values_are_put_into_the_flag_line_only(notebook: Any) -> None:
    """`{x}` and `$x` are the notebook's in the flags, and the ranks' own business in the code."""
    notebook.run("k = 3\nname = 'parts'")
    notebook.run("%%parallel -n {k + 1} -r $k -o {name}\nprint(f'{k}')")
    call = notebook.session.calls[-1]
    assert (notebook.session.world_size, call.ranks, call.source) == (4, (3,), "print(f'{k}')\n")
    notebook.run("%parallel -r {k} f'{k} $k'")
    assert (notebook.session.calls[-1].ranks, notebook.session.calls[-1].source) == ((3,), "f'{k} $k'")


@pytest.mark.parametrize(
    ("line", "ranks", "source"),
    [
        ("%parallel x - 1", None, "x - 1"),
        ("%parallel -r 0 'a  b'", (0,), "'a  b'"),
        ("%parallel -r0 x", (0,), "x"),
        ("%parallel --ranks=1 x", (1,), "x"),
        ("%parallel -- -x", None, "-x"),
        ("%rank 1 x if y else '-n'", (1,), "x if y else '-n'"),
        ("%rank -1 x", (1,), "x"),
        ("%rank --quiet 1 x", (1,), "x"),
    ],
)
def test_lines_run_on_ranks(notebook: Any, line: str, ranks: Any, source: str) -> None:
    """`%parallel` and `%rank` take flags first, and leave the expression as it is written."""
    assert notebook.run(line).error is None
    assert (notebook.session.calls[-1].ranks, notebook.session.calls[-1].source) == (ranks, source)


def test_rank_cell(notebook: Any) -> None:
    """`%%rank 1` is short for `%%parallel -r 1`."""
    notebook.run("%%rank 1 --share a\nx")
    assert (notebook.session.calls[-1].ranks, notebook.session.calls[-1].share) == ((1,), ("a",))


@pytest.mark.parametrize(
    ("cell", "words"),
    [
        ("%%parallel --tiemout 3\nx", "unknown flag --tiemout; did you mean --timeout?"),
        ("%%parallel -q\nx", "unknown flag -q"),
        ("%%parallel -N 4\nx", "unknown flag -N; did you mean -n?"),
        ("%%parallel -np 4\nx", "did you mean -n?"),
        ("%%parallel --nproc 4\nx", "did you mean -n?"),
        ("%%parallel --help\nx", "--help is no flag here (%%parallel? shows the flags)"),
        ("%parallel_restart -n 4", "there is no -n here: %%parallel -n N sets the number of ranks"),
        ("rank", "`rank` itself is a variable of the ranks: %parallel rank shows it"),
        ("# mine\n%%parallel\nx", "%%parallel must be the first line of its cell"),
        ("y = 1\n%%rank 0\nx", "%%rank must be the first line of its cell"),
        ("%%parallel -n 0\nx", "0 ranks cannot run a cell"),
        ("%%parallel -n -2\nx", "-2 ranks cannot run a cell"),
        ("%%parallel -n x\nx", "'x' is no whole number of ranks"),
        ("%%parallel -n 2.0\nx", "'2.0' is no whole number of ranks"),
        ("%%parallel -n\nx", "-n needs a value: -n N "),
        ("%%parallel --draw\nx", "--draw needs a value: --draw NAME"),
        ("%%parallel -n 10000\nx", "10000 ranks"),
        ("%%parallel -n " + "9" * 5000 + "\nx", "ranks"),
        ("%%parallel -n 2 -r 5\nx", "no rank 5: ranks are 0-1"),
        ("%%parallel -r 0 1\nx", "did you mean -n 1?"),
        ("%%parallel -r 0, 1\nx", "empty part"),
        ("%%parallel 4\nx", "did you mean -n 4?"),
        ("%%parallel four\nx", "unexpected 'four'"),
        ("%%parallel -r zero\nx", "names no rank"),
        ("%%parallel -o 1a\nx", "no name of a variable"),
        ("%%parallel --share a,b+c\nx", "no name of a variable"),
        ("%%parallel --timeout -1\nx", "no positive number"),
        ("%%parallel --timeout nan\nx", "no positive number"),
        ("%%parallel --seed a\nx", "no whole number"),
        ("%%parallel --output tabs\nx", "invalid choice"),
        ("%parallel_result", "no cell was run with --async yet"),
        ("%parallel_result nothing", "nothing is no handle of an --async cell, which `cell = _` keeps"),
        ("%%parallel --on-error ignore\nx", "invalid choice"),
        ("%%parallel 'a\nx", "unexpected"),
        ("%%rank\nx", "the ranks are missing"),
        ("%%rank 9\nx", "no rank 9"),
        ("%rank 0", "nothing to run"),
        ("%parallel", "nothing to run"),
        ("%parallel_restart", "no ranks are running"),
        ("%parallel_stop now", "unexpected 'now'"),
        ("%parallel_tb", "no cell has failed"),
        ("%share", "which arrays?"),
        ("%sharing_strategy nothing", "available: file_descriptor, file_system"),
        ("%sharing_strategy mmap directory", "options are written name=value"),
        ("%sharing_strategy mmap directory=", "options are written name=value"),
        ("%sharing_strategy mmap folder=/tmp", "'mmap' has no option folder"),
        ("%sharing_strategy file_system directory=/tmp", "'file_system' has no option directory"),
        ("%sharing_strategy mmap directory=/not/there", "there is no directory /not/there"),
        ("%sharing_strategy mmap directory='/tmp", "No closing quotation"),
        ("%sharing_strategy --bnch", "did you mean --bench?"),
        ("%sharing_strategy mmap --bench", "flags come before the name"),
        ("%sharing_strategy --bench mmap", "--bench measures all strategies"),
        ("%sharing_strategy --seconds 3", "--seconds belongs to --bench"),
        ("%sharing_strategy --bench --seconds 0", "no positive number"),
        ("%parallel_status now", "unexpected 'now'"),
        ("%parallel_segments --all", "unknown flag --all"),
        ("%parallel_who x", "unexpected 'x'"),
        ("%parallel_doctor -v", "unknown flag -v"),
        ("%share nothing", "the notebook has no variable 'nothing'"),
    ],
)
def test_mistakes_are_one_line(notebook: Any, cell: str, words: str) -> None:
    """A wrong flag is one line on stderr that says what is wrong, and no cell runs."""
    out = notebook.run(cell)
    assert type(out.error).__name__ == "UsageError"
    assert words in out.stderr
    assert out.stderr.count("\n") == 1
    assert not [call for session in notebook.sessions.made for call in session.calls]


def test_shrinking_is_refused_with_the_reason(notebook: Any) -> None:
    """`-n` below the running size is refused if the ranks that would go hold variables."""
    notebook.run("%%parallel -n 4\nx = 1")
    out = notebook.run("%%parallel -n 2\nx")
    assert out.stderr == "UsageError: rank 1 holds x: use -r 0, or %parallel_stop first\n"
    notebook.run("%%parallel -n 6\nx")
    assert notebook.session.world_size == 6
    assert len(notebook.sessions.made) == 1


@pytest.mark.parametrize(
    ("cell", "line"),
    [
        ("%%parallel -n 4\nx = 1\nif x\n    y", 3),
        ("\n\n%%parallel\nx = = 1", 4),
        ("%%parallel\nreturn 1", 2),
        ("%%rank 0\n\n  \nx = (", 4),
        ("1\n%parallel x = = 1", 2),
    ],
)
def test_a_cell_that_does_not_compile(notebook: Any, cell: str, line: int) -> None:
    """One SyntaxError with the notebook's own line, before ranks are started."""
    out = notebook.run(cell)
    assert isinstance(out.error, SyntaxError)
    assert type(out.error).__name__ == "SyntaxError"
    assert out.error.lineno == line
    assert notebook.sessions.made == []
    assert out.stdout.count("SyntaxError") == 1
    assert "nbparallel" not in out.stdout
    assert f"line {line}" in out.stdout


def test_indentation_and_odd_cells_do_not_compile_either(notebook: Any) -> None:
    """A wrong indentation, a null byte, a huge number: SyntaxErrors, too."""
    out = notebook.run("%%parallel\nif True:\nx")
    assert type(out.error).__name__ == "IndentationError"
    assert "IndentationError" in out.stdout
    for source in ("x = '\0'", "9" * 5000):
        out = notebook.run(f"%%parallel\n{source}")
        assert isinstance(out.error, SyntaxError)


def test_what_ranks_understand_compiles(notebook: Any) -> None:
    """Magics, shell commands and top-level await are fine in a cell for ranks."""
    out = notebook.run("%%parallel\n%matplotlib inline\n!ls\nawait f()\nasync for x in y: pass\nx?")
    assert out.error is None


def test_the_lines_above_count_as_the_gutter_does(notebook: Any) -> None:
    """Blank lines above `%%parallel` count; a `%parallel` line counts from its own line."""
    notebook.run("\n\n%%parallel\nx")
    assert notebook.session.calls[-1].line_offset == 3
    notebook.run("a = 1\n%parallel x")
    assert notebook.session.calls[-1].line_offset == 1
    notebook.run("get_ipython().run_cell_magic('parallel', '', 'x')")
    assert notebook.session.calls[-1].line_offset == 1


def failing(sink: Any, call: Any) -> None:
    """Fail on rank 2 as a session does."""
    sink.stream(0, "stdout", "before\n")
    sink.finish()
    frame = FrameLine("In[1]", 4, "<module>", "1 / 0")
    failure = RankFailure(
        2,
        1,
        "ZeroDivisionError",
        "division by zero",
        pickle.dumps(ZeroDivisionError("division by zero")),
        (),
        (frame,),
    )
    raise parallel_error.build_parallel_error({2: failure}, {0: "", 1: "", 3: ""})


def test_errors_name_the_root_cause(notebook: Any) -> None:
    """The cell's error has the root cause in its text, and its traceback is the ranks', not ours."""
    notebook.play(failing)
    out = notebook.run("%%parallel -n 4\n1 / 0")
    assert (
        str(out.error) == "ZeroDivisionError on rank 2, line 4: division by zero (ranks 0-1, 3 were released)"
    )
    shown = out.stdout
    assert shown.startswith("[rank 0] before\n[rank 2]\nCell In[1]")
    assert "Cell In[1], line 4\n    1 / 0\nZeroDivisionError: division by zero" in shown
    assert "run_cell_magic" not in shown + out.stderr
    assert "Cell In[1], line 4" in notebook.run("%parallel_tb").stdout
    assert "put breakpoint() into the cell" in notebook.run("%debug").stderr
    for rank in (0, 3):
        out = notebook.run(f"%parallel_tb -r {rank}")
        assert out.stderr == f"UsageError: rank {rank} raised nothing; rank 2 did\n"
    assert "there is no rank 4: ranks are 0-3" in notebook.run("%parallel_tb -r 4").stderr
    assert "did you mean -r 2?" in notebook.run("%parallel_tb 2").stderr
    assert "did you mean -r 0,2?" in notebook.run("%parallel_restart 0,2").stderr


@pytest.mark.parametrize("kind", [CellTimeoutError, KeyboardInterrupt])
def test_the_traceback_after_a_stop_shows_where_each_rank_was(notebook: Any, kind: type) -> None:
    """`%parallel_tb` after a time-out or an interrupt; an interrupt before there was anything keeps it.

    `%debug` names it, and does not open a debugger in the frames that waited for the ranks.
    """
    frame = FrameLine("In[1]", 3, "<module>", "time.sleep(60)")
    failure = RankFailure(1, 1, "KeyboardInterrupt", "", None, (), (frame,), Cause.INTERRUPT)

    def stopped(sink: Any, call: Any) -> None:
        error = kind("stopped")
        error.failures = {1: failure}
        raise error

    notebook.play(stopped)
    assert isinstance(notebook.run("%%parallel -n 2\ntime.sleep(60)").error, kind)
    shown = notebook.run("%parallel_tb -r 1").stdout
    assert "[rank 1]\nCell In[1], line 3\n    time.sleep(60)\nKeyboardInterrupt" in shown
    assert "%parallel_tb shows where each was" in notebook.run("%debug").stderr
    notebook.play(lambda sink, call: (_ for _ in ()).throw(KeyboardInterrupt))
    notebook.run("%parallel 1")
    assert notebook.run("%parallel_tb").stdout == shown


def test_equal_tracebacks_are_shown_once(notebook: Any) -> None:
    """`%parallel_tb` folds them as a cell's error does."""
    frames = {rank: (FrameLine("In[1]", 3 + rank // 2, "<module>", "sleep(60)"),) for rank in range(3)}

    def stopped(sink: Any, call: Any) -> None:
        error = CellTimeoutError("stopped")
        error.failures = {
            rank: RankFailure(rank, 1, "KeyboardInterrupt", "", None, (), frames[rank], Cause.INTERRUPT)
            for rank in frames
        }
        raise error

    notebook.play(stopped)
    notebook.run("%%parallel -n 3\nsleep(60)")
    shown = notebook.run("%parallel_tb").stdout
    assert [line for line in shown.splitlines() if line[:1] == "["] == ["[ranks 0-1]", "[rank 2]"]


def test_usage_lines_show_words_that_are_no_flags(notebook: Any) -> None:
    """A reader of the help learns what to write where."""
    for magic, usage in (
        ("%share", "%share NAME [NAME ...]"),
        ("%%rank", "%%rank R [flags]"),
        ("%rank", "%rank R [flags] CODE"),
        ("%parallel", "%parallel [flags] CODE"),
    ):
        assert parsers()[magic].format_usage() == f"usage: {usage}\n"


def test_session_errors_are_shown_without_our_frames(notebook: Any) -> None:
    """An error that no rank raised is its name and text; an interrupt stays a KeyboardInterrupt."""

    def cannot_start(sink: Any, call: Any) -> None:
        raise StartError("no ranks: out of memory")

    def interrupted(sink: Any, call: Any) -> None:
        raise KeyboardInterrupt

    notebook.play(cannot_start)
    out = notebook.run("%%parallel\nx")
    assert isinstance(out.error, NbParallelError)
    assert out.stdout == "StartError: no ranks: out of memory\n"
    notebook.play(interrupted)
    out = notebook.run("%%parallel\nx")
    assert isinstance(out.error, KeyboardInterrupt)
    assert out.stdout == "KeyboardInterrupt\n"


def test_quiet_and_local(notebook: Any) -> None:
    """`--quiet` shows nothing; `--local` runs the cell in the notebook first, and its error once."""
    notebook.play(hello)
    assert notebook.run("%%parallel -n 4 --quiet\nx").stdout == ""
    out = notebook.run("%%parallel --local -r 0\nhere = 5\nprint('here')")
    assert out.stdout == "here\n[rank 0] hello from 0\nOut[rank 0]: 7\n"
    assert notebook.shell.user_ns["here"] == 5
    calls = len(notebook.session.calls)
    out = notebook.run("%%parallel --local\n1 / 0")
    assert isinstance(out.error, ZeroDivisionError)
    assert out.stdout.count("division by zero") == 1
    assert len(notebook.session.calls) == calls


def test_restart_and_stop(notebook: Any) -> None:
    """`%parallel_restart -r 1-2` restarts these; after `%parallel_stop` the next cell makes a session."""
    notebook.run("%%parallel -n 4\nx")
    notebook.run("%parallel_restart -r 1-2\n%parallel_restart")
    assert notebook.session.restarted == [1, 2, None]
    first = notebook.session
    stopped = notebook.run("%parallel_stop\n%parallel_stop").stdout
    ended, nothing = stopped.splitlines()
    assert re.fullmatch(r"ranks 0-\d were ended; the notebook's arrays stay as they are", ended)
    assert nothing.startswith("no ranks are running")
    assert first.closed
    notebook.run("%%parallel -n 3\nx")
    assert notebook.session is not first


def test_the_first_cell_says_what_ranks_find(notebook: Any) -> None:
    """One line above its output, once; not for --quiet, and not if `%config` says so (as these tests do)."""
    notebook.play(hello)
    assert notebook.run("%%parallel -n 2\nx").stdout.startswith("[rank 0]")
    notebook.run("%config NbParallel.welcome = True")
    assert notebook.run("%%parallel --quiet\nx").stdout == ""
    first, output, *_ = notebook.run("%%parallel\nx").stdout.splitlines()
    assert len(first) <= 79
    for name in ("rank", "send", "all_reduce", "%%parallel?"):
        assert re.search(rf"{re.escape(name)}(?!\w)", first)
    assert output == "[rank 0] hello from 0"
    assert notebook.run("%parallel x").stdout.startswith("[rank 0]")


def test_configuration(notebook: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """`%config NbParallel` shows and sets the defaults; a flag wins, and what cannot be is one line."""
    assert "NbParallel" in notebook.run("%config").stdout
    shown = notebook.run("%config NbParallel").stdout
    names = (
        "keep_messages", "n", "output", "queue", "quiet", "ranks_per_cpu", "start_method", "timeout", "warm",
        "welcome",
    )  # fmt: skip
    for name in names:
        assert f"NbParallel.{name}=<" in shown
    assert shown.count("Current: ") == len(names)
    wrong = notebook.run("%config NbParallel.output = 'tabs'")
    assert wrong.stderr.count("\n") <= 1
    assert notebook.shell.run_line_magic("config", "NbParallel.output") == "rank"
    # IPython keeps what it was told, and would tell it to the extension when it is loaded again.
    for told in (True, False):
        nbparallel_magics.unload(notebook.shell)
        capsys.readouterr()
        nbparallel_magics.load(notebook.shell)
        said = capsys.readouterr().err
        assert said.startswith("nbparallel: The 'output' trait") == told
        assert said.endswith("The default is used.\n") == told
    notebook.run("%config NbParallel.n = 3\n%config NbParallel.timeout = 9.0")
    notebook.run("%%parallel\nx")
    assert (notebook.session.world_size, notebook.session.calls[-1].timeout) == (3, 9.0)
    notebook.run("%%parallel --timeout 2\nx")
    assert notebook.session.calls[-1].timeout == 2


def test_help(notebook: Any) -> None:
    """Every magic's help has a description, an example, and a line for each flag."""
    from nbparallel_magics.completion import parsers
    from nbparallel_magics.magics import ParallelMagics

    assert len(ParallelMagics.magics["line"]) >= 12
    for parser in parsers().values():
        for action in parser._actions:
            assert action.help, (parser.prog, action)
    for name in ParallelMagics.magics["line"]:
        text = notebook.shell.find_line_magic(name).__doc__
        assert "Example:" in text
        assert f"%{name}" in text.partition("Example:")[2]


@pytest.fixture
def strategies(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Give the registry back as it was."""
    from nbparallel.sharing.strategies import registry

    monkeypatch.setattr(registry.strategies()["mmap"], "_directory", None)
    with temporary_registry():
        yield registry


def plain(out: Any) -> str:
    """Return the text of the one display of a cell."""
    (display,) = out.outputs
    return str(display.data["text/plain"])


class Mine(FileDescriptorStrategy):
    """Memory of my own.

    And more about it.
    """

    name = "mine"  # type: ignore[assignment]


def test_switching_with_an_option(notebook: Any, strategies: Any, tmp_path: Any) -> None:
    """`%sharing_strategy mmap directory=…` switches and says so in a line; {names} are expanded."""
    assert plain(notebook.run("%sharing_strategy")).startswith("sharing strategy: file_descriptor\n")
    folder = tmp_path / "with blank"
    folder.mkdir()
    notebook.shell.user_ns["folder"] = str(folder)
    text = notebook.run("%sharing_strategy mmap 'directory={folder}'").stdout
    assert text.startswith(f"sharing strategy: mmap (directory={folder} ")
    assert text.endswith(" for new arrays; those that are shared already stay as they are\n")
    assert text.count("\n") == 1
    assert f"current directory={folder}" in plain(notebook.run("%sharing_strategy"))
    assert strategies.find_strategy().directory == str(folder)
    notebook.run("%sharing_strategy mmap 'directory={folder}' allow_network=False")
    assert strategies.choice().options["mmap"] == {"directory": str(folder), "allow_network": False}
    copied = notebook.run("%sharing_strategy copy").stdout
    assert copied.startswith("sharing strategy: copy for new arrays;")
    assert copied.count("\n") == 1
    assert strategies.strategies()["mmap"].directory == str(folder), "options stay for the next time"
    assert notebook.run("%sharing_strategy mmap directory=~").error is None
    strategies.register_sharing_strategy("mine", Mine())
    assert re.search(r"\nmine +yes +Memory of my own\.\n", plain(notebook.run("%sharing_strategy")))


def test_a_strategy_that_is_missing_here(
    notebook: Any, strategies: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is listed with the reason, and choosing it is one line that says why not, and what works."""
    monkeypatch.setattr(strategies.strategies()["file_system"], "_directory", "/not/there")
    text = plain(notebook.run("%sharing_strategy"))
    assert re.search(r"\nfile_system +no: there is no directory /not/there", text)
    out = notebook.run("%sharing_strategy file_system")
    assert "'file_system' is not available: there is no directory /not/there here (" in out.stderr
    assert out.stderr.count("\n") == 1
    assert "sharing strategy: file_descriptor" in plain(notebook.run("%sharing_strategy"))


def test_an_interrupt_while_ranks_are_brought_up(notebook: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A press in the moment in which the supervisor starts: it is stopped, the next cell works (F23)."""
    with monkeypatch.context() as patched:
        patched.setattr(
            "nbparallel.session.processes.launch.SupervisorLaunch",
            lambda method: os.kill(os.getpid(), signal.SIGINT),
        )
        assert isinstance(notebook.run("%%parallel -n 2\n1").error, KeyboardInterrupt)
    assert notebook.session.closed
    assert not notebook.session.calls
    assert notebook.run("%%parallel -n 2\n1").error is None
    assert notebook.session.calls


def test_load_and_unload_leave_nothing(notebook: Any) -> None:
    """50 times load, load again, cell, unload: hooks, magics and threads stay as many (F70)."""
    import nbparallel_magics

    shell = notebook.shell
    nbparallel_magics.unload(shell)

    def state() -> tuple[Any, ...]:
        events = {name: len(found) for name, found in shell.events.callbacks.items()}
        magics = {kind: sorted(found) for kind, found in shell.magics_manager.magics.items()}
        return (
            events,
            magics,
            len(shell.configurables),
            tuple(shell.custom_exceptions),
            sorted(shell.magics_manager.registry),
            threading.active_count(),
        )

    before = state()
    for _ in range(50):
        nbparallel_magics.load(shell)
        nbparallel_magics.load(shell)
        assert notebook.run("%%parallel -n 2\nx").error is None
        nbparallel_magics.unload(shell)
        nbparallel_magics.unload(shell)
    assert state() == before
    assert all(session.closed for session in notebook.sessions.made)
    assert notebook.run("%parallel x").error is not None


def test_a_custom_exception_handler_keeps_working(notebook: Any) -> None:
    """A handler that the user set before is still called, and is back after unloading."""
    import nbparallel_magics

    shell = notebook.shell
    nbparallel_magics.unload(shell)
    seen: list[type] = []
    shell.set_custom_exc((LookupError,), lambda self, kind, value, trace, tb_offset=None: seen.append(kind))
    try:
        nbparallel_magics.load(shell)
        notebook.run("{}['a']")
        assert seen == [KeyError]
        nbparallel_magics.unload(shell)
        notebook.run("{}['a']")
        assert seen == [KeyError, KeyError]
    finally:
        shell.set_custom_exc((), None)
