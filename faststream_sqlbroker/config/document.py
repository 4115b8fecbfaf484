"""Parsing of a YAML file into values with their lines and columns.

Only those parts of YAML 1.1 are accepted that YAML 1.2 kept: only `true` and `false` are
booleans, `22:00` and dates are text, and a number does not begin with 0. A key may occur once.
"""

import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from math import isfinite
from typing import Any, ClassVar

import yaml

from faststream_sqlbroker.core.text import replace_invisible
from faststream_sqlbroker.exceptions import ConfigError

Path = tuple[str | int, ...]
"""Keys and list indexes that lead to a value."""

MAX_NODES = 20_000
"""Values per file; an alias counts with all its values, because a few lines of aliases could
otherwise fill the memory.
"""
MAX_DEPTH = 50
"""Nesting levels of a file."""
MIN_HIDDEN = 4
"""Minimum characters of a variable's value that is also hidden within longer text."""

_VARIABLE = re.compile(r"\$(?P<escaped>\$)?\{(?P<inside>[^}]*)(?P<end>\}?)")
_INSIDE = re.compile(r"(?P<name>[A-Za-z_][A-Za-z0-9_]*)(:-(?P<default>.*))?", re.DOTALL)


class _TooDeepError(yaml.MarkedYAMLError):  # type: ignore[misc]
    """The file is YAML, but nested too deeply."""


_TAG = "tag:yaml.org,2002:"
_AS_WRITTEN = "as written"
"""Tag of an unquoted value without a tag; compared by `is`, because a file may use a tag of this
text.
"""


class _Loader(yaml.BaseLoader):  # type: ignore[misc]
    """Creates nodes only, so that a file cannot create objects."""

    yaml_implicit_resolvers: ClassVar[Any] = {None: [(_AS_WRITTEN, re.compile(""))]}
    _levels = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        """Compose the next node within the depth limit: PyYAML recurses for each level.

        Without a limit a deeply nested file would end in a RecursionError.
        """
        if self._levels > MAX_DEPTH:
            mark = self.peek_event().start_mark
            raise _TooDeepError(problem=f"more than {MAX_DEPTH} levels", problem_mark=mark)
        self._levels += 1
        node = super().compose_node(parent, index)
        self._levels -= 1
        return node


def _parse_finite(text: str) -> float:
    """Convert text to a float; raise ValueError if the number is too large."""
    number = float(text)
    if not isfinite(number):
        raise ValueError(text)
    return number


_FLOAT = r"[-+]?(\.[0-9]+|(0|[1-9][0-9]*)(\.[0-9]*)?)([eE][-+]?[0-9]+)?"
_KINDS: Mapping[str, tuple[re.Pattern[str], Callable[[str], Any]]] = {
    "bool": (re.compile("true|True|TRUE|false|False|FALSE"), lambda text: text.lower() == "true"),
    "int": (re.compile("[-+]?(0|[1-9][0-9]*)"), int),
    "float": (re.compile(_FLOAT), _parse_finite),
    "null": (re.compile("(~|null|Null|NULL)?"), lambda _: None),
}
"""Core schema of YAML 1.2: pattern and parser of each kind. Python's own parsers would accept
more, such as 1_0.
"""


@dataclass(frozen=True, slots=True)
class Mistake:
    """One mistake in a YAML file.

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
        """Format the mistake in a line."""
        where = f"{self.where}: " if self.where else ""
        return f"line {self.line}, column {self.column}: {where}{self.text}"


@dataclass(frozen=True, slots=True)
class SourcePosition:
    """A line and a column, starting at 1."""

    line: int
    column: int


START = SourcePosition(1, 1)


@dataclass(slots=True, repr=False)
class Document:
    """A parsed file; without a `repr`, because the text may contain passwords."""

    path: object
    """Path of the file, for errors."""
    value: Any = None
    value_positions: dict[Path, SourcePosition] = field(default_factory=dict)
    """Start of each value."""
    key_positions: dict[Path, SourcePosition] = field(default_factory=dict)
    """Start of each key of a mapping, by the path of its value."""
    mistakes: list[Mistake] = field(default_factory=list)
    secrets: dict[str, str] = field(default_factory=dict)
    """Values of variables, each with the text that the file has in its place."""

    def add_mistake(self, path: Path, text: str, *, at_key: bool = False) -> None:
        """Record a mistake at a value, or at the key; values of variables are hidden.

        A path to a missing option is reported at the part of the path that the file has.
        """
        existing_path = self.find_existing_path(path)
        position = self.key_positions.get(existing_path) if at_key else None
        self.add_mistake_at(
            position or self.value_positions.get(existing_path, START), existing_path, text
        )

    def add_mistake_at(self, position: SourcePosition, path: Path, text: str) -> None:
        """Record a mistake at a position, without values of variables; the same mistake only once.

        Mistakes are collected, and `check` raises all of them together.
        """
        mistake = Mistake(
            position.line, position.column, format_path(path), self.mask_secrets(text)
        )
        if mistake not in self.mistakes:
            self.mistakes.append(mistake)

    def find_existing_path(self, path: Path) -> Path:
        """Return `path` without the steps that the file does not have.

        Paths of Pydantic's errors have steps for forms of a value, such as the members of a union.
        """
        existing_path: Path = ()
        for step in path:
            if (*existing_path, step) in self.value_positions:
                existing_path = (*existing_path, step)
        return existing_path

    def mask_secrets(self, text: str) -> str:
        """Replace values of variables in `text` by the names of the variables.

        Errors quote values of the file, and a variable may hold a password.
        """
        for value in sorted(self.secrets, key=len, reverse=True):
            name = self.secrets[value]
            text = text.replace(repr(value), name)
            if len(value) < MIN_HIDDEN:
                continue
            for form in _list_forms(value):
                text = text.replace(form, name)
                # Errors shorten long values, so hide the beginning of a secret as well.
                for length in range(len(form), MIN_HIDDEN - 1, -1):
                    text = text.replace(f"{form[:length]}...", f"{name}...")
        return text

    def check(self) -> None:
        """Raise the mistakes, if there are any.

        Raises:
            ConfigError: there are mistakes, sorted by position.
        """
        if self.mistakes:
            order = sorted(self.mistakes, key=lambda mistake: (mistake.line, mistake.column))
            raise ConfigError(self.path, order)


def _list_forms(value: str) -> list[str]:
    """Return `value` unchanged, and in the forms of a longer quoted text in an error.

    A text within quotes has escapes, such as those of line ends, so a secret may look different.
    """
    escaped = "".join(repr(character)[1:-1] for character in value)
    return list(dict.fromkeys((value, escaped, escaped.replace("'", "\\'"))))


def format_path(path: Path) -> str:
    """Format a path, such as "queues.mails.policies[0]"."""
    text = ""
    for step in path:
        text += f"[{step}]" if isinstance(step, int) else f".{replace_invisible(step)}"
    return text.removeprefix(".")


def read_document(text: str, path: object, variables: Mapping[str, str]) -> Document:
    """Parse a YAML file, and replace variables; names and types of options are not checked here.

    Args:
        text: Text of the file.
        path: Path of the file, for errors.
        variables: Values for `${NAME}`.

    Raises:
        ConfigError: the text is not YAML.
    """
    document = Document(path)
    root: Any = None
    try:
        root = _Loader(text).get_single_node()
    except (yaml.YAMLError, ValueError, OverflowError) as error:
        # ValueError and OverflowError: PyYAML does not catch those of "\UFFFFFFFF", or of a
        # version with 5,000 digits.
        mark = getattr(error, "problem_mark", None)
        if mark is None:
            # A character that YAML does not allow: the error only has its offset.
            preceding_lines = text[: getattr(error, "position", 0)].split("\n")
            position = SourcePosition(len(preceding_lines), len(preceding_lines[-1]) + 1)
        else:
            position = SourcePosition(mark.line + 1, mark.column + 1)
        kind = "" if isinstance(error, _TooDeepError) else "invalid YAML: "
        document.add_mistake_at(position, (), f"{kind}{_format_reason(error)}")
    # Outside of the handler: YAML's error quotes a line, which may contain a password.
    document.check()
    if root is not None:
        document.value = _ValueBuilder(document, variables).build(root, ())
    return document


class _ValueBuilder:
    """Builds values from nodes."""

    def __init__(self, document: Document, variables: Mapping[str, str]) -> None:
        self._document = document
        self._variables = variables
        self._nodes = 0

    def build(self, node: Any, path: Path) -> Any:
        """Return the value of a node, or None after a mistake, which is recorded.

        Raises:
            ConfigError: the file has too many values.
        """
        position = _get_position(node)
        self._document.value_positions[path] = position
        self._nodes += 1
        if self._nodes > MAX_NODES or len(path) > MAX_DEPTH:
            self._document.add_mistake_at(
                position,
                path,
                f"more than {MAX_NODES} values or {MAX_DEPTH} levels: an alias counts in full",
            )
            self._document.check()
        kind = str(node.tag).removeprefix(_TAG)
        if isinstance(node, yaml.MappingNode) and kind == "map":
            return self._build_mapping(node, path)
        if isinstance(node, yaml.SequenceNode) and kind == "seq":
            return [self.build(item, (*path, n)) for n, item in enumerate(node.value)]
        if isinstance(node, yaml.ScalarNode):
            return self._build_scalar(node, path)
        return self._reject_tag(node, path)

    def _build_mapping(self, node: Any, path: Path) -> dict[str, Any]:
        """Return the mapping of a node, without repeated keys and keys that are not text.

        Those are recorded as mistakes.
        """
        mapping: dict[str, Any] = {}
        lines: dict[str, int] = {}
        for key_node, value_node in node.value:
            key = key_node.value
            position = _get_position(key_node)
            if not isinstance(key_node, yaml.ScalarNode) or _find_kind(key_node, key) != "str":
                self._document.add_mistake_at(
                    position, path, "a key must be text: put it in quotes"
                )
            elif key in lines:
                self._document.add_mistake_at(
                    position, (*path, key), f"duplicate key, first used in line {lines[key]}"
                )
            else:
                lines[key] = position.line
                self._document.key_positions[*path, key] = position
                mapping[key] = self.build(value_node, (*path, key))
        return mapping

    def _build_scalar(self, node: Any, path: Path) -> Any:
        """Return the value of a scalar after the replacement of variables.

        The kind is that of the tag, or without a tag that of the resulting text; a variable may
        hold a number.
        """
        text = _VARIABLE.sub(lambda match: self._replace_variable(match, path), node.value)
        kind = _find_kind(node, text)
        if kind == "str":
            return text
        if kind not in _KINDS:
            return self._reject_tag(node, path)
        pattern, parse = _KINDS[kind]
        if pattern.fullmatch(text):
            # Python refuses integers with too many digits, and this parser infinite floats.
            with suppress(ValueError):
                return parse(text)
        self._document.add_mistake(path, f"this is not a valid {kind}")
        return None

    def _replace_variable(self, match: re.Match[str], path: Path) -> str:
        """Return the text for a `${...}`: a variable's value, the default, or a literal `${`.

        Values from the environment are remembered as secrets, which errors do not show.
        """
        if match["escaped"]:
            return match[0][1:]
        reference = _INSIDE.fullmatch(match["inside"])
        if reference is None or not match["end"]:
            self._document.add_mistake(
                path, "write a variable as ${NAME} or ${NAME:-default}, and a literal ${ as $${"
            )
            return ""
        value = self._variables.get(reference["name"], reference["default"])
        if value is None:
            self._document.add_mistake(
                path, f"the environment variable {reference['name']} is not set"
            )
            return ""
        if value and reference["name"] in self._variables:
            self._document.secrets[value] = f"${{{reference['name']}}}"
        return value

    def _reject_tag(self, node: Any, path: Path) -> None:
        """Record a tag, such as !python/object, that stands for no plain value."""
        self._document.add_mistake(path, f"unknown tag {node.tag!r}: remove it")


_HINTS = {
    "found character '\\t'": "a tab is not allowed here: indent with spaces",
    "expected <block end>": "the indentation does not match the lines above",
    "mapping values are not allowed": "': ' is not allowed here: end the line above with ':', or "
    "put text that contains ': ' in quotes",
    "second occurrence": "the anchor after & is defined twice: choose another name",
    "but found another document": "a file has a single document: remove the second '---'",
    "could not find expected ':'": "a key has no ': ' after it",
    "found unexpected end of stream": "a quote is not closed",
}
"""Beginnings of PyYAML's messages for frequent mistakes, each with a clearer message."""


def _format_reason(error: Exception) -> str:
    """Explain why the text is not YAML, and where the unfinished part starts; nothing is quoted.

    PyYAML's own message would quote a line of the file, which may contain a password.
    """
    text = getattr(error, "problem", None) or getattr(error, "reason", None)
    text = text or "it has an invalid character or version"
    text = next((hint for prefix, hint in _HINTS.items() if text.startswith(prefix)), text)
    start_mark = getattr(error, "context_mark", None)
    mark = getattr(error, "problem_mark", None)
    if start_mark is None or mark is None or start_mark.line == mark.line:
        return str(text)
    return f"{text} (in the part that begins in line {start_mark.line + 1})"


def _get_position(node: Any) -> SourcePosition:
    return SourcePosition(node.start_mark.line + 1, node.start_mark.column + 1)


def _find_kind(node: Any, text: str) -> str:
    """Return the kind of a value, such as "int": from the tag, or without a tag from the text.

    `text` is given separately, because variables in the node's own text were replaced. Text that
    matches no other kind is "str".
    """
    if node.tag is not _AS_WRITTEN:
        return str(node.tag).removeprefix(_TAG)
    return next((kind for kind, (pattern, _) in _KINDS.items() if pattern.fullmatch(text)), "str")
