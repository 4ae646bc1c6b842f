"""The magics in a shell: what they ask the session for, and how mistakes in a line or a cell read."""

from __future__ import annotations

import re
from typing import Any

import pytest

from nbparallel_magics.views.introspection import parsers


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
        ("%%parallel --timeout soon\nx", "'soon' is no positive number of seconds"),
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
        ("%rank 0", "nothing to run on this line; %%rank, with two %, runs those below"),
        ("%parallel", "nothing to run"),
        ("%parallel -n 4\nx = 1", "nothing to run on this line; %%parallel, with two %, runs those below"),
        ("%parallel_restart", "no ranks are running"),
        ("%parallel_stop now", "unexpected 'now'"),
        ("%parallel_tb", "no cell has failed"),
        ("%parallel_output", "no cell has run on ranks yet"),
        ("%parallel_races", "the last cell on ranks was not checked for data races"),
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
        ("%parallel_segments --every", "unknown flag --every"),
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


def test_usage_lines_show_words_that_are_no_flags(notebook: Any) -> None:
    """A reader of the help learns what to write where."""
    for magic, usage in (
        ("%share", "%share NAME [NAME ...]"),
        ("%%rank", "%%rank R [flags]"),
        ("%rank", "%rank R [flags] CODE"),
        ("%parallel", "%parallel [flags] CODE"),
    ):
        assert parsers()[magic].format_usage() == f"usage: {usage}\n"


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


def test_help(notebook: Any) -> None:
    """Every magic's help has a description, an example, and a line for each flag."""
    from nbparallel_magics.magics import ParallelMagics
    from nbparallel_magics.views.introspection import parsers

    assert len(ParallelMagics.magics["line"]) >= 12
    for parser in parsers().values():
        for action in (*parser._get_optional_actions(), *parser._get_positional_actions()):
            assert action.help, (parser.prog, action)
    for name in ParallelMagics.magics["line"]:
        text = notebook.shell.find_line_magic(name).__doc__
        assert "Example:" in text
        assert f"%{name}" in text.partition("Example:")[2]


def test_the_last_cells_output_again(notebook: Any) -> None:
    """`%parallel_output` shows it as often as one likes, and that of the next cell when there is one."""
    for text in ("first\n", "second\n"):
        notebook.play(lambda sink, call, text=text: sink.stream(1, "stdout", text))
        shown = notebook.run("%parallel 1").stdout
        assert f"[rank 1] {text}" in shown
        assert notebook.run("%parallel_output").stdout == notebook.run("%parallel_output").stdout == shown
    notebook.play(lambda sink, call: None)
    notebook.run("%parallel 1")
    assert "the last cell has shown nothing" in notebook.run("%parallel_output").stdout
