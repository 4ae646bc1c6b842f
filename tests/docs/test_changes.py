"""Fragments of the changelog can be collected: their names say what they are, their text is one entry."""

from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
FRAGMENTS = sorted(path for path in (ROOT / "changes").iterdir() if path.name != "README.md")
KINDS = ("feature", "bugfix", "removal", "misc")


def problems(name: str, text: str) -> list[str]:
    """Return what is wrong with one fragment."""
    topic, _, rest = name.partition(".")
    found = []
    if not topic or not topic.replace("-", "").isalnum() or rest not in [f"{kind}.md" for kind in KINDS]:
        found.append(f"call it <topic>.<kind>.md, kind one of {', '.join(KINDS)}")
    if (
        not text.strip()
        or not text.endswith("\n")
        or "\n\n" in text
        or text.lstrip().startswith(("*", "#", "-"))
    ):
        found.append("write one paragraph without a bullet or heading, with a newline at its end")
    return found


def test_a_fragment_is_one_entry() -> None:
    """Every file in changes/ has a topic, a kind and one paragraph; after a release there is none."""
    wrong = {path.name: problems(path.name, path.read_text()) for path in FRAGMENTS}
    assert not {name: found for name, found in wrong.items() if found}


def test_a_version_has_a_short_list() -> None:
    """Each version of the changelog has at most thirty entries, of one or two lines each."""
    for version in (ROOT / "CHANGELOG.md").read_text().split("\n## ")[1:]:
        entries = [line for line in version.splitlines() if line.startswith("* ")]
        assert 0 < len(entries) <= 30
        assert max(map(len, entries)) < 330
