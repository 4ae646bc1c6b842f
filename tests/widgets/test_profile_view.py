"""A profile as text and as a picture: the code with a bar a line."""

from __future__ import annotations

from xml.etree import ElementTree

from nbparallel.distributed.tracing.profiling.line_log import LineLog
from nbparallel.distributed.tracing.profiling.profile import Profile
from nbparallel_widgets.measured_view import ProfileView

MS = 1_000_000
TEXTS = {
    "<3>": ("", ("", "a = f(x)", "", " ", *["# nothing"] * 10, "y = all_reduce(a < 3)")),
    "<2>": ("In[2]", ("def f(x):", "    return x @ x")),
}


def log(rank: int, call: int, wait: int, *, remark: str = "") -> LineLog:
    """Return a rank's: milliseconds in the function, and waiting in an operation, which moves data for 10."""
    lines = (
        ("", 0, MS, 0, 0), ("<3>", 2, MS, 0, 0), ("<2>", 2, call * MS, 0, 0),
        ("<3>", 15, (wait + 10) * MS, wait * MS, 10 * MS),
    )  # fmt: skip
    return LineLog(rank, lines, TEXTS, remark)


PROFILE = Profile.of([log(0, 100, 200), log(1, 300, 0)], [2])


def test_ranks_side_by_side() -> None:
    """Average, fastest and slowest rank of each line; the longest line in a sentence."""
    assert [(line.file, line.line) for line in PROFILE.lines] == [("", 2), ("", 15), ("In[2]", 2)]
    longest = PROFILE.longest
    assert longest is not None
    assert (longest.code, longest.fastest, longest.slowest) == ("    return x @ x", 0, 1)
    assert PROFILE.title == (
        "64 % of the time is line 2 of In[2], mostly computing: 300 ms on rank 1, 100 ms on rank 0"
    )
    assert PROFILE.figures(longest) == ("200 ms", "100 ms on rank 0", "300 ms on rank 1")
    assert PROFILE.lines[1].mean.waiting == 0.1
    assert PROFILE.remarks == ("what rank 2 did was lost",)


def test_text_and_picture_say_the_same() -> None:
    """Every line with its bar, no blank ones; a gap for many without time; code is escaped."""
    text, html = str(PROFILE), ProfileView(PROFILE)._repr_html_()
    (row,) = (line for line in text.splitlines() if "all_reduce" in line)
    assert row.split()[:2] == ["15", "·" * 12 + "▒"]
    assert "⋮" in text
    assert text.count("# nothing") == 4
    _, _, rest = html.partition("</style>")
    assert "<script" not in html
    picture = ElementTree.fromstring(rest)
    rows = [["".join(cell.itertext()) for cell in row] for row in picture.iter("tr")]
    assert [row[0] for row in rows if row[-1]] == ["line", "2", "5", "12", "13", "14", "15", "line", "2"]
    assert [row[0] for row in rows if not row[-1]] == ["⋮"]
    for number, code in (("15", "y = all_reduce(a < 3)"), ("2", "    return x @ x")):
        (found,) = (row for row in rows if row[0] == number and row[-1] == code)
        assert all(figure in text for figure in found[2:5])
    assert PROFILE.title in "".join(picture.itertext())


def test_files_of_one_name() -> None:
    """Each has its own lines, and as much of its path as tells them apart; cells of one number likewise."""
    texts = {
        name: (label, (f"x = {name!r}",))
        for name, label in (
            ("/home/a/util.py", "util.py"), ("/home/b/util.py", "util.py"),
            ("/tmp/1.py", "In[7]"), ("/tmp/2.py", "In[7]"), ("/home/b/main.py", "main.py"),
        )
    }  # fmt: skip
    profile = Profile.of([LineLog(0, tuple((name, 1, MS, 0, 0) for name in texts), texts, "")], [])
    assert [(line.file, line.code) for line in profile.lines] == [
        ("In[7] (1.py)", "x = '/tmp/1.py'"), ("In[7] (2.py)", "x = '/tmp/2.py'"),
        ("a/util.py", "x = '/home/a/util.py'"), ("b/util.py", "x = '/home/b/util.py'"),
        ("main.py", "x = '/home/b/main.py'"),
    ]  # fmt: skip
    assert all(line.file in str(profile) for line in profile.lines)


def test_nothing_was_seen() -> None:
    """A cell in which no line took time, or whose ranks all have a remark, has a profile too."""
    for logs in ([], [LineLog(0, (), {}, "other tools use it")]):
        profile = Profile.of(logs, [])
        assert profile.title == "no line took any time"
        assert profile.title in ProfileView(profile)._repr_html_()
