"""Parsing of the magics' lines: argparse with errors of one line, and ranks that begin with a minus."""

from __future__ import annotations

import argparse
import difflib
import functools
import keyword
import math
import re
import shlex
from argparse import ArgumentTypeError
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar

from IPython.core.error import UsageError

from nbparallel.errors import without_frames

_NUMBER = r"-?[0-9]{1,9}"
_ONE = re.compile(f"({_NUMBER})")
_SPAN = re.compile(f"({_NUMBER})-({_NUMBER})")
_SLICE = re.compile(f"({_NUMBER})?:({_NUMBER})?(?::({_NUMBER})?)?")
_PART = re.compile(r"@(.+)")
_FORMS = "write numbers and ranges as in 0,2-3, a slice as in ::2, or -1 for the last"
_ONE_PART: Mapping[str, range] = {}


@dataclass(frozen=True, slots=True)
class RankSpec:
    """A selection of ranks, to be resolved when their number is known."""

    text: str
    """As the user wrote it."""

    @classmethod
    def parse(cls, text: str) -> RankSpec:
        """Check the form of `text`; ArgumentTypeError names what is wrong with it."""
        for part in _parts(text):
            if _PART.fullmatch(part):
                continue
            match = _SLICE.fullmatch(part)
            if match and match[3] is not None and int(match[3]) == 0:
                raise ArgumentTypeError(f"{part!r} in the ranks {text!r}: the step of a slice must not be 0")
            if not match and not _ONE.fullmatch(part) and not _SPAN.fullmatch(part):
                raise ArgumentTypeError(f"{part!r} in the ranks {text!r} names no rank: {_FORMS}")
        return cls(text)

    def resolve(self, world_size: int, parts: Mapping[str, range] = _ONE_PART) -> tuple[int, ...]:
        """Return the ranks, in ascending order, each once; UsageError if one does not exist."""
        chosen: set[int] = set()
        for part in _parts(self.text):
            if match := _PART.fullmatch(part):
                if match[1] not in parts:
                    names = f"hosts are {', '.join(parts)}" if parts else "the session is on one machine"
                    raise UsageError(f"there is no host {match[1]!r}: {names}")
                chosen.update(parts[match[1]])
            elif match := _SLICE.fullmatch(part):
                start, stop, step = (int(group) if group else None for group in match.groups())
                chosen.update(range(world_size)[start:stop:step])
            elif match := _ONE.fullmatch(part):
                chosen.add(self._rank(match[1], world_size))
            elif match := _SPAN.fullmatch(part):
                first, last = (self._rank(number, world_size) for number in match.groups())
                if first > last:
                    raise UsageError(
                        f"{part!r} in the ranks {self.text!r} runs backwards: write {last}-{first}"
                    )
                chosen.update(range(first, last + 1))
        if not chosen:
            raise UsageError(f"the ranks {self.text!r} are none of {_valid(world_size)}")
        return tuple(sorted(chosen))

    def _rank(self, number: str, world_size: int) -> int:
        rank = int(number)
        if not -world_size <= rank < world_size:
            raise UsageError(f"there is no rank {rank}: {_valid(world_size)}, and -1 is the last")
        return rank % world_size


def _parts(text: str) -> list[str]:
    parts = [part.strip() for part in text.split(",")]
    if not all(parts):
        raise ArgumentTypeError(f"the ranks {text!r} have an empty part: {_FORMS}")
    return parts


def _valid(world_size: int) -> str:
    return "the only rank is 0" if world_size == 1 else f"ranks are 0-{world_size - 1}"


Function = TypeVar("Function", bound=Callable[..., Any])
_WORD = re.compile(r"""\s*((?:"[^"]*"|'[^']*'|[^\s"'])+)""")
_FLAG = re.compile(r"--?[A-Za-z]")
_ASKS_FOR_HELP = ("-h", "-help", "--help", "--h")
_COUNTS = ("-p", "-np", "--np", "--n", "--nproc", "--nprocs", "--nproc-per-node", "--world-size")
"""What other tools call the number of ranks."""


class MagicParser(argparse.ArgumentParser):
    """Parses the line of one magic; every mistake is a `UsageError` of one line.

    Parameters
    ----------
    words : str
        What its usage is, where it takes more than flags.
    """

    def __init__(self, magic: str, description: str, example: str, words: str = "") -> None:
        super().__init__(
            prog=magic,
            usage=f"{magic} {words}".replace("%", "%%") if words else None,
            description=description,
            epilog="Example:\n\n" + "\n".join(f"    {line}" for line in example.strip().splitlines()),
            formatter_class=argparse.RawDescriptionHelpFormatter,
            add_help=False,
            allow_abbrev=False,
        )
        # what a line means depends on nothing else, and many cells have the same one
        self._parsed = functools.lru_cache(maxsize=100)(lambda words: self.parse_args(list(words)))

    def error(self, message: str) -> NoReturn:
        """Raise instead of ending the process."""
        flag = message.removeprefix("argument ").partition(":")[0].rpartition("/")[2]
        if message.endswith(": expected one argument") and flag in self._option_string_actions:
            message = f"{flag} needs a value: {flag} {self._option_string_actions[flag].metavar or 'VALUE'}"
        raise UsageError(f"{self.prog}: {message} ({self.prog}? shows the flags)")

    def parse_line(self, line: str, *, leading_ranks: bool = False) -> argparse.Namespace:
        """Parse a line that consists of flags only, but for one leading word, the ranks."""
        options, rest = self.parse_head(line, leading_ranks=leading_ranks)
        if rest.isdecimal() and "-n" in self._option_string_actions:
            self.error(f"unexpected {rest!r}; did you mean -n {rest}?")
        if "-r" in self._option_string_actions and _are_ranks(rest):
            self.error(f"unexpected {rest!r}; did you mean -r {rest}?")
        if rest and not rest.startswith("#"):  # a comment after the flags
            self.error(f"unexpected {rest!r}: flags begin with a minus, ranks are separated by commas only")
        return options

    def parse_head(
        self, line: str, *, leading_ranks: bool = False, expand: Callable[[str], str] = str
    ) -> tuple[argparse.Namespace, str]:
        """Parse the flags at the start of `line`, and return them with the rest as it is written.

        Parameters
        ----------
        leading_ranks : bool
            The first word that is no flag is the ranks; it must be there.
        expand : callable
            Expands ``{x}`` and ``$x`` in the flags' values.
        """
        tokens: list[str] = []
        position = 0
        while match := _WORD.match(line, position):
            word = match[1]
            if leading_ranks and not _FLAG.match(word):
                tokens.append("--ranks=" + expand(_unquoted(word)))
                leading_ranks = False
            elif word == "--":
                position = match.end()
                break
            elif _FLAG.match(word):
                flag, equals, value = self._split(word)
                takes_value = self._action(flag).nargs != 0
                if takes_value and not equals and (following := _WORD.match(line, match.end())):
                    match, equals, value = following, "=", following[1]
                # joined by "=": argparse would take the value of `-r -1,0` for a flag
                tokens.append(f"{flag}{equals}{expand(_unquoted(value))}" if equals else flag)
            else:
                break
            position = match.end()
        if leading_ranks:
            # typed without %, as IPython allows: then the ranks' variable is meant
            missing = f"the ranks are missing, as in {self.prog} 0,2-3"
            own = "; `rank` itself is a variable of the ranks: %parallel rank shows it"
            self.error(missing + own * (self.prog == "%rank" and not line.strip()))
        parsed = self._parsed(tuple(_joined(token) for token in tokens))
        return argparse.Namespace(**vars(parsed)), line[position:].strip()

    def _split(self, word: str) -> tuple[str, str, str]:
        joined = len(word) > 2 and not word.startswith("--") and word not in _COUNTS  # -np is not -n p
        if joined and word[:2] in self._option_string_actions:
            return word[:2], "=", word[2:].removeprefix("=")  # -n4
        return word.partition("=")

    def _action(self, flag: str) -> argparse.Action:
        known = self._option_string_actions
        if flag not in known:
            if flag in _ASKS_FOR_HELP:
                self.error(f"{flag} is no flag here")  # the end of the message lists the flags
            if flag in _COUNTS and "-n" in known:
                self.error(f"unknown flag {flag}; did you mean -n?")
            if flag in ("-n", *_COUNTS):
                self.error(f"there is no {flag} here: %%parallel -n N sets the number of ranks")
            near = [flag.lower()] if flag.lower() in known else []
            if not near and len(flag) > 2:  # one letter is too little for a guess
                near = difflib.get_close_matches(flag, known, n=1, cutoff=0.5)
            self.error(f"unknown flag {flag}" + (f"; did you mean {near[0]}?" if near else ""))
        return known[flag]


def _are_ranks(text: str) -> bool:
    try:
        RankSpec.parse(text)
    except ArgumentTypeError:
        return False
    return True


def _joined(token: str) -> str:
    """Join a short flag to its value without the equals sign, which would be part of the value."""
    return re.sub(r"^(-[A-Za-z])=", r"\1", token) if not token.startswith("--") else token


def _unquoted(word: str) -> str:
    try:
        parts = shlex.split(word)
    except ValueError:
        return word
    return parts[0] if len(parts) == 1 else word


def documented_by(parser: MagicParser) -> Callable[[Function], Function]:
    """Make the parser's help the magic's, so that ``%magic?`` shows flags and an example."""

    def decorate(function: Function) -> Function:
        function.__doc__ = parser.format_help()
        return without_frames()(function)

    return decorate


def count(text: str) -> int:
    """Type of ``-n``: the number of ranks; the machine's own limit is checked when they start."""
    try:
        number = int(text)
    except ValueError:
        raise ArgumentTypeError(f"{text!r} is no whole number of ranks") from None
    if number < 1:
        raise ArgumentTypeError(f"{number} ranks cannot run a cell; the least is 1")
    return number


def counts(text: str) -> tuple[int, ...]:
    """Type of ``--scaling``: numbers of ranks, separated by commas."""
    return tuple(count(part) for part in text.split(","))


def seconds(text: str) -> float:
    """Type of ``--timeout``."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf:
        raise ArgumentTypeError(f"{text!r} is no positive number of seconds")
    return number


def moment(text: str) -> float:
    """Type of ``--from``: also 0."""
    return 0.0 if text == "0" else seconds(text)


def seed(text: str) -> int:
    """Type of ``--seed``: what ``numpy.random.SeedSequence`` takes."""
    if not re.fullmatch(r"[0-9]{1,80}", text):
        raise ArgumentTypeError(f"{text!r} is no whole number from 0 up")
    return int(text)


def name(text: str) -> str:
    """Type of ``-o``."""
    if not text.isidentifier() or keyword.iskeyword(text):
        raise ArgumentTypeError(f"{text!r} is no name of a variable")
    return text


def names(text: str) -> tuple[str, ...]:
    """Type of ``--share``: names separated by commas."""
    return tuple(name(part.strip()) for part in text.split(",") if part.strip())
