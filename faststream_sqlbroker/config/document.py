"""A YAML file as values, each with its line and column.

Of YAML 1.1 it takes what YAML 1.2 has kept: only `true` and `false` are booleans, `22:00` and dates
are text, and a number does not begin with 0. A key may be there once.
"""

import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from math import isfinite
from typing import Any, ClassVar

import yaml

from faststream_sqlbroker.core.text import visible
from faststream_sqlbroker.exceptions import ConfigError

Path = tuple[str | int, ...]
"""The keys and the positions in lists that lead to a value."""

MOST_NODES = 20_000
"""Values of a file, each alias counted with all that it stands for: a few lines of aliases could
otherwise fill the memory."""
DEEPEST = 50
"""Levels of a file."""
SHORTEST_HIDDEN = 4
"""Characters from which on the value of a variable is also hidden within longer text."""

_VARIABLE = re.compile(r"\$(?P<escaped>\$)?\{(?P<inside>[^}]*)(?P<end>\}?)")
_INSIDE = re.compile(r"(?P<name>[A-Za-z_][A-Za-z0-9_]*)(:-(?P<default>.*))?", re.DOTALL)


class _TooDeepError(yaml.MarkedYAMLError):  # type: ignore[misc]
    """It is YAML, but not of a service."""


_TAG = "tag:yaml.org,2002:"
_AS_WRITTEN = "as written"
"""The tag of a value that has none and is not in quotes; compared by `is`, as a file may have a tag
of this text.
"""


class _Loader(yaml.BaseLoader):  # type: ignore[misc]
    """Makes nodes only, so that a file can make no objects."""

    yaml_implicit_resolvers: ClassVar[Any] = {None: [(_AS_WRITTEN, re.compile(""))]}
    _levels = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        """The next node; PyYAML calls itself for each level, so that deep files would end it."""
        if self._levels > DEEPEST:
            mark = self.peek_event().start_mark
            raise _TooDeepError(problem=f"more than {DEEPEST} levels", problem_mark=mark)
        self._levels += 1
        node = super().compose_node(parent, index)
        self._levels -= 1
        return node


def _finite(text: str) -> float:
    number = float(text)
    if not isfinite(number):
        raise ValueError(text)
    return number


_FLOAT = r"[-+]?(\.[0-9]+|(0|[1-9][0-9]*)(\.[0-9]*)?)([eE][-+]?[0-9]+)?"
_KINDS: Mapping[str, tuple[re.Pattern[str], Callable[[str], Any]]] = {
    "bool": (re.compile("true|True|TRUE|false|False|FALSE"), lambda text: text.lower() == "true"),
    "int": (re.compile("[-+]?(0|[1-9][0-9]*)"), int),
    "float": (re.compile(_FLOAT), _finite),
    "null": (re.compile("(~|null|Null|NULL)?"), lambda _: None),
}
"""The core schema of YAML 1.2: how a value of each kind is written, and what makes it. Python would
take more, such as 1_0."""


@dataclass(frozen=True, slots=True)
class Mistake:
    """One mistake in a file of YAML.

    Args:
        line: Its line, from 1 on.
        column: Its column in characters, from 1 on.
        where: The keys that lead to it, such as "queues.mails.forward_to"; "" for the file.
        text: What is wrong, and what to do; without values of environment variables.
    """

    line: int
    column: int
    where: str
    text: str

    def __str__(self) -> str:
        """In one line."""
        where = f"{self.where}: " if self.where else ""
        return f"line {self.line}, column {self.column}: {where}{self.text}"


@dataclass(frozen=True, slots=True)
class Place:
    """A line and a column, from 1 on."""

    line: int
    column: int


START = Place(1, 1)


@dataclass(slots=True, repr=False)
class Document:
    """What was read; its text is not shown, as it may have passwords."""

    path: object
    """Of the file, for errors."""
    value: Any = None
    values: dict[Path, Place] = field(default_factory=dict)
    """Where each value begins."""
    keys: dict[Path, Place] = field(default_factory=dict)
    """Where the key of a value of a mapping begins."""
    mistakes: list[Mistake] = field(default_factory=list)
    hidden: dict[str, str] = field(default_factory=dict)
    """What a variable has put in, and how it was written."""

    def note(self, path: Path, text: str, *, at_key: bool = False) -> None:
        """Note a mistake at a value, or at its key; values of variables are hidden."""
        known = self.known(path)
        place = self.keys.get(known) if at_key else None
        self.note_at(place or self.values.get(known, START), known, text)

    def note_at(self, place: Place, path: Path, text: str) -> None:
        """Note a mistake at a place."""
        mistake = Mistake(place.line, place.column, written(path), self.masked(text))
        if mistake not in self.mistakes:
            self.mistakes.append(mistake)

    def known(self, path: Path) -> Path:
        """`path` without the steps that the file does not have."""
        found: Path = ()
        for step in path:
            if (*found, step) in self.values:
                found = (*found, step)
        return found

    def masked(self, text: str) -> str:
        """`text` with the names of variables in place of their values."""
        for value in sorted(self.hidden, key=len, reverse=True):
            name = self.hidden[value]
            text = text.replace(repr(value), name)
            if len(value) < SHORTEST_HIDDEN:
                continue
            for shown in _shown(value):
                text = text.replace(shown, name)
                # Errors cut what is long: the beginning of a secret must not stay.
                for length in range(len(shown), SHORTEST_HIDDEN - 1, -1):
                    text = text.replace(f"{shown[:length]}...", f"{name}...")
        return text

    def check(self) -> None:
        """Go on only without mistakes.

        Raises:
            ConfigError: there are some; they are sorted by their places.
        """
        if self.mistakes:
            order = sorted(self.mistakes, key=lambda mistake: (mistake.line, mistake.column))
            raise ConfigError(self.path, order)


def _shown(value: str) -> list[str]:
    """`value` as it is, and as it stands within a longer text that an error has in quotes."""
    escaped = "".join(repr(each)[1:-1] for each in value)
    return list(dict.fromkeys((value, escaped, escaped.replace("'", "\\'"))))


def written(path: Path) -> str:
    """A path as people write it: "queues.mails.policies[0]"."""
    text = ""
    for step in path:
        text += f"[{step}]" if isinstance(step, int) else f".{visible(step)}"
    return text.removeprefix(".")


def read_document(text: str, path: object, variables: Mapping[str, str]) -> Document:
    """The values of a YAML file.

    Args:
        text: The file's.
        path: Of the file, for errors.
        variables: What `${NAME}` is replaced by.

    Raises:
        ConfigError: it is no YAML.
    """
    document = Document(path)
    root: Any = None
    try:
        root = _Loader(text).get_single_node()
    except (yaml.YAMLError, ValueError, OverflowError) as error:
        # The last two: PyYAML lets pass "\UFFFFFFFF", and a version of 5,000 digits.
        mark = getattr(error, "problem_mark", None)
        if mark is None:
            # It is of a character that no file of YAML may have, and names its position only.
            before = text[: getattr(error, "position", 0)].split("\n")
            place = Place(len(before), len(before[-1]) + 1)
        else:
            place = Place(mark.line + 1, mark.column + 1)
        kind = "" if isinstance(error, _TooDeepError) else "this is no YAML: "
        document.note_at(place, (), f"{kind}{_reason(error)}")
    # Outside of the handler: the text of YAML's error quotes a line, which may have a password.
    document.check()
    if root is not None:
        document.value = _Reading(document, variables).value(root, ())
    return document


class _Reading:
    """Makes values of nodes."""

    def __init__(self, document: Document, variables: Mapping[str, str]) -> None:
        self._document = document
        self._variables = variables
        self._nodes = 0

    def value(self, node: Any, path: Path) -> Any:
        """The value of a node; None after a mistake, which is noted.

        Raises:
            ConfigError: there are too many.
        """
        place = _place(node)
        self._document.values[path] = place
        self._nodes += 1
        if self._nodes > MOST_NODES or len(path) > DEEPEST:
            self._document.note_at(
                place, path, f"more than {MOST_NODES} values or {DEEPEST} levels: is it an alias?"
            )
            self._document.check()
        kind = str(node.tag).removeprefix(_TAG)
        if isinstance(node, yaml.MappingNode) and kind == "map":
            return self._mapping(node, path)
        if isinstance(node, yaml.SequenceNode) and kind == "seq":
            return [self.value(item, (*path, n)) for n, item in enumerate(node.value)]
        if isinstance(node, yaml.ScalarNode):
            return self._scalar(node, path)
        return self._unknown_tag(node, path)

    def _mapping(self, node: Any, path: Path) -> dict[str, Any]:
        found: dict[str, Any] = {}
        lines: dict[str, int] = {}
        for key_node, value_node in node.value:
            key = key_node.value
            place = _place(key_node)
            if not isinstance(key_node, yaml.ScalarNode) or _kind(key_node, key) != "str":
                self._document.note_at(place, path, "a key is text: put it in quotes")
            elif key in lines:
                self._document.note_at(
                    place, (*path, key), f"the key is there twice, first in line {lines[key]}"
                )
            else:
                lines[key] = place.line
                self._document.keys[*path, key] = place
                found[key] = self.value(value_node, (*path, key))
        return found

    def _scalar(self, node: Any, path: Path) -> Any:
        text = _VARIABLE.sub(lambda match: self._replaced(match, path), node.value)
        kind = _kind(node, text)
        if kind == "str":
            return text
        if kind not in _KINDS:
            return self._unknown_tag(node, path)
        form, make = _KINDS[kind]
        if form.fullmatch(text):
            # Python takes no integer of so many digits, and no float of such a size.
            with suppress(ValueError):
                return make(text)
        self._document.note(path, f"this is no {kind}")
        return None

    def _replaced(self, match: re.Match[str], path: Path) -> str:
        if match["escaped"]:
            return match[0][1:]
        inside = _INSIDE.fullmatch(match["inside"])
        if inside is None or not match["end"]:
            self._document.note(
                path, "a variable is written ${NAME} or ${NAME:-default}, and $${ is ${ itself"
            )
            return ""
        value = self._variables.get(inside["name"], inside["default"])
        if value is None:
            self._document.note(path, f"the environment variable {inside['name']} is not set")
            return ""
        if value and inside["name"] in self._variables:
            self._document.hidden[value] = f"${{{inside['name']}}}"
        return value

    def _unknown_tag(self, node: Any, path: Path) -> None:
        self._document.note(path, f"the tag {node.tag!r} is not known: leave it out")


_PLAIN = {
    "found character '\\t'": "there is a tab: indent with spaces",
    "expected <block end>": "the indentation does not fit that of the lines above",
    "mapping values are not allowed": "there can be no ': ' here: look whether the line above ends "
    "with ':', and put text that has ': ' in quotes",
    "second occurrence": "the name behind & is there twice: choose another",
    "but found another document": "a second document begins: a file has one, leave '---' out",
    "could not find expected ':'": "a key has no ': ' behind it",
    "found unexpected end of stream": "a quote is not closed",
}
"""What PyYAML says of frequent mistakes begins so; and what to say in its place."""


def _reason(error: Exception) -> str:
    """Why it is no YAML, and where what is not ended has begun; no text of the file."""
    text = getattr(error, "problem", None) or getattr(error, "reason", None)
    text = text or "it has a character or a version that does not exist"
    text = next((plain for begin, plain in _PLAIN.items() if text.startswith(begin)), text)
    begun = getattr(error, "context_mark", None)
    mark = getattr(error, "problem_mark", None)
    if begun is None or mark is None or begun.line == mark.line:
        return str(text)
    return f"{text} (it is part of what begins in line {begun.line + 1})"


def _place(node: Any) -> Place:
    return Place(node.start_mark.line + 1, node.start_mark.column + 1)


def _kind(node: Any, text: str) -> str:
    """Tell the kind of a value by its tag, else by how it is written."""
    if node.tag is not _AS_WRITTEN:
        return str(node.tag).removeprefix(_TAG)
    return next((kind for kind, (form, _) in _KINDS.items() if form.fullmatch(text)), "str")
