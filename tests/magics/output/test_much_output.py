"""Much output in a real kernel: complete, within its budget, bounded; whatever the bytes are."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.harness.kernel import CellOutcome, Kernel
from tests.magics.cells import text, with_ranks

pytestmark = pytest.mark.time_limit(120)


def sent(outcome: CellOutcome) -> int:
    """Return how many characters of text the front end was sent."""
    return sum(len(m.content["text"]) for m in outcome.messages if m.kind == "stream")


def test_1500_lines_of_four_ranks(shared_kernel: Kernel) -> None:
    """Every line is there once, in rank order; the front end was sent at most twice as much."""
    kernel = with_ranks(shared_kernel, 4)
    outcome = kernel.run("%%parallel\nfor step in range(1500):\n    print(f'rank {rank} prints line {step}')")
    lines = ["".join(f"rank {rank} prints line {step}\n" for step in range(1500)) for rank in range(4)]
    assert text(outcome) == "".join(f"[rank {rank}]\n{block}" for rank, block in enumerate(lines))
    labels = sum(m.content["text"].count("[rank ") for m in outcome.messages if m.kind == "stream")
    assert sent(outcome) <= 2 * sum(map(len, lines)) + labels * len("[rank 0]\n") + 4096


@pytest.mark.slow
def test_20000_lines_of_four_ranks_are_all_there(kernel: Kernel) -> None:
    """A tight print loop on every rank: nothing is dropped, nothing is twice."""
    outcome = with_ranks(kernel, 4).run(
        "%%parallel\nfor step in range(20_000):\n    print(rank, step)", timeout=60
    )
    for rank in range(4):
        assert f"[rank {rank}]\n" + "".join(f"{rank} {step}\n" for step in range(20_000)) in text(outcome)


@pytest.mark.slow
@pytest.mark.fault("F67")
def test_f67_binary_and_endless_output_is_bounded(kernel: Kernel) -> None:
    """12 MB without a line end, every byte there is, a loop without end: a notice, a file, the next cell."""
    kernel = with_ranks(kernel, 2)
    every = kernel.run(
        "%%parallel\nimport sys\nsys.stdout.buffer.write(bytes(range(256)))\nsys.stdout.flush()"
    )
    assert r"\x80\x81" in text(every)
    assert text(every).startswith("[ranks 0-1]\n\x00\x01")
    code = "%%parallel -r 1\nfor _ in range(12):\n    sys.stdout.write('x' * 1_000_000)"
    outcome = kernel.run(code, timeout=60)
    assert outcome.status == "ok", outcome.traceback
    assert sent(outcome) < 11_000_000
    notice = re.search(r"the cell printed more than 10.0 MiB; all of it is in (\S+)", text(outcome))
    assert notice
    log = Path(notice[1])
    content = log.read_text()
    assert (content[:9], content.count("x")) == ("[rank 1]\n", 12_000_000)
    quiet = kernel.run(
        "%%parallel --quiet --timeout 1\nimport os\nwhile True: os.write(1, bytes(1_000_000))", timeout=60
    )
    assert quiet.ename == "CellTimeoutError"
    assert sent(quiet) == 0
    assert text(kernel.run("%parallel all_reduce(1)")) == "Out[ranks 0-1]: 2\n"
    kernel.begin("exit()")
    kernel.wait_until(lambda: not log.parent.exists(), 15, "removal of the logs when the kernel ends")


@pytest.mark.slow
def test_displays_are_updated_and_cleared(shared_kernel: Kernel) -> None:
    """A handle's update, `clear_output` and an inline plot without `%matplotlib`: each rank's own."""
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    kernel = with_ranks(shared_kernel, 2)
    outcome = kernel.run(
        "%%parallel\nfrom IPython.display import HTML, clear_output, display\n"
        "print('gone', rank)\nclear_output()\n"
        "handle = display(HTML(f'<i>{rank}</i>'), display_id=True)\nhandle.update(HTML(f'<b>{rank}</b>'))"
    )
    final: dict[str, str] = {}
    for message in outcome.messages:
        if message.kind in ("display_data", "update_display_data"):
            identity = message.content["transient"]["display_id"]
            final[identity] = message.content["data"]["text/html"]
    assert sorted(final.values()) == ["<b>0</b>", "<b>1</b>"]
    assert "gone" not in text(outcome)
    pytest.importorskip("ipywidgets", reason="ipywidgets is not installed")
    widget = kernel.run("%%parallel -r 0\nimport ipywidgets\nipywidgets.IntSlider(3)", timeout=60)
    assert text(widget) == "Out[rank 0]: IntSlider(value=3)\n"
    assert widget.displays == ()  # a view without its model would be an error on the page
    plotted = kernel.run(
        "%%parallel\nimport matplotlib.pyplot as plt\nplt.plot([1, rank]);\nplt.show()", timeout=60
    )
    pictures = [d for d in plotted.displays if "image/png" in d]
    assert len({d["image/png"] for d in pictures}) == 2
    assert text(plotted) == "[rank 0]\n[rank 1]\n"
