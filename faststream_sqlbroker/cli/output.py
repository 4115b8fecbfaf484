"""How commands show what they found: as JSON for programs, as tables for people. Names and texts of
others are shown as they are, and cannot drive the terminal.
"""

import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from datetime import datetime
from enum import Enum
from functools import partial
from textwrap import wrap
from typing import Annotated, Any, Literal

import typer
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from faststream_sqlbroker.core.overview import Count
from faststream_sqlbroker.core.text import visible
from faststream_sqlbroker.exceptions import SetupError


class PlainConsole(Console):
    """A console to which text is text: no markup, no emoji codes, no colours of its own, no control
    characters.

    Args:
        stderr: Print there and not to stdout.
        width: Characters of a line; None: what the terminal has.
    """

    def __init__(self, *, stderr: bool = False, width: int | None = None) -> None:
        super().__init__(stderr=stderr, width=width, markup=False, emoji=False, highlight=False)

    def render_str(self, text: str, **options: Any) -> Text:
        """As rich does it, for lines as well as cells and titles; U+FFFD stands for what would not
        be seen.
        """
        return super().render_str(visible(text), **options)


AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]
DEEPEST = 100
"""Levels of JSON that are shown; Python's encoder ends at some three hundred."""
SHOWN_TEXT = 60
"""Characters of a text in a cell."""
IDS = frozenset({"id", "fingerprint", "worker"})
"""Columns that are given to other commands."""
LEAST_WIDTH = 16
"""Characters of a column that is still read with ease; a shorter one is never folded."""
LONGEST_WORD = 30
"""Characters of a word that is never folded in a column; a longer one may be."""
UNLIMITED = 10_000
"""Characters of a line for a program."""
GAP = 2
"""Spaces between columns."""


def print_json(value: Any) -> None:
    """One JSON document; moments in ISO 8601, bytes as text with escapes."""
    # Escaped to ASCII: control characters of a message cannot drive the terminal.
    typer.echo(json.dumps(_safe(value), default=_plain, indent=2))


def print_json_line(value: Any) -> None:
    """One JSON document in one line, written at once."""
    typer.echo(json.dumps(_safe(value), default=_plain))


def print_error(text: str, kind: str, exit_code: int) -> None:
    """One JSON document in one line on stderr; stdout has results only."""
    document = {"error": text, "type": kind, "exit_code": exit_code}
    typer.echo(json.dumps(document), err=True)


def _safe(value: Any, levels: int = DEEPEST) -> Any:
    """The value as every reader of JSON takes it, whatever a message's body is: NaN and Infinity as
    text, and "..." for what is nested too deeply.
    """
    if isinstance(value, float) and not math.isfinite(value):
        return json.dumps(value)
    if not isinstance(value, dict | list | tuple):
        return value
    if not levels:
        return "..."
    if isinstance(value, dict):
        return {name: _safe(item, levels - 1) for name, item in value.items()}
    return [_safe(item, levels - 1) for item in value]


def _plain(value: Any) -> Any:
    if isinstance(value, datetime):
        return value.isoformat()
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, bytes):
        return value.decode(errors="backslashreplace")
    return str(value)


def row_of(value: Any) -> dict[str, Any]:
    """A dataclass as JSON shows it, as far as its `repr` does; states by their names."""
    return {field.name: _item(getattr(value, field.name)) for field in fields(value) if field.repr}


def _item(value: Any) -> Any:
    # The enumeration of states is text, too, which JSON would show by its value.
    if isinstance(value, Enum):
        return value.name
    if is_dataclass(value) and not isinstance(value, type):
        return row_of(value)
    if isinstance(value, Mapping):
        return dict(value)
    # No further down: a body may be nested as deeply as it likes.
    if isinstance(value, tuple | list):
        return [row_of(each) if is_dataclass(each) else each for each in value]
    return value


def print_table(
    title: str, columns: Sequence[str], rows: Iterable[Sequence[Any]], *, whole: bool = False
) -> None:
    """Print a table, with numbers to the right. Texts are cut, unless they are `whole`."""
    width = _width()
    table = table_of(columns, rows, whole=whole, width=width)
    if title:
        print_line(title)
    PlainConsole(width=UNLIMITED if width is None else width).print(table)


def _width() -> int | None:
    """Characters of a line for people; None: a program reads it, which gets whole lines."""
    console = PlainConsole()
    return console.width if console.is_terminal or "COLUMNS" in os.environ else None


def table_of(
    columns: Sequence[str],
    rows: Iterable[Sequence[Any]],
    *,
    whole: bool = False,
    width: int | None = None,
) -> Table:
    """Make a table whose words are whole in a line of `width` characters.

    Columns are folded between words. Where even that is too wide, each row is shown as lines of
    its own: a column and its value in each.
    """
    listed = [list(row) for row in rows]
    cells = [[_cell(value, whole=whole) for value in row] for row in listed]
    texts = [[name, *(row[at] for row in cells)] for at, name in enumerate(columns)]
    widths = [max(map(cell_len, column)) for column in texts]
    if width is not None:
        least = [_least_width(column, most) for column, most in zip(texts, widths, strict=True)]
        spare = width - sum(least) - GAP * len(least)
        if spare < 0:
            return _records(columns, cells, width)
        # The last column says most.
        for at, most in reversed(list(enumerate(widths))):
            widths[at] = min(most, least[at] + spare)
            spare -= widths[at] - least[at]
    table = Table(box=None, padding=(0, GAP, 0, 0))
    for at, name in enumerate(columns):
        number = all(isinstance(row[at], int | float | Count) for row in listed)
        justify: Literal["left", "right"] = "right" if listed and number else "left"
        table.add_column(name, justify=justify, overflow="fold", width=widths[at])
    for row in cells:
        table.add_row(*row)
    return table


def _least_width(texts: Sequence[str], most: int) -> int:
    # An id in two lines could not be copied.
    if texts[0] in IDS:
        return most
    words = (cell_len(word) for text in texts for word in text.split())
    return max(min(most, LEAST_WIDTH), min(max(words, default=0), LONGEST_WORD))


def _records(columns: Sequence[str], cells: Sequence[Sequence[str]], width: int) -> Table:
    """Each row below the other, without what is empty."""
    table = Table(box=None, padding=(0, GAP, 0, 0), show_header=False)
    names = max(map(cell_len, columns))
    table.add_column(width=names)
    table.add_column(overflow="fold", width=max(width - names - 2 * GAP, LEAST_WIDTH))
    for at, row in enumerate(cells):
        if at:
            table.add_row()
        for name, text in zip(columns, row, strict=True):
            if text:
                table.add_row(name, text)
    return table


def print_line(text: str) -> None:
    """Lines as they are for a program; for people they are folded between words."""
    console = PlainConsole()
    width = _width()
    for line in text.splitlines():
        parts = [line]
        if width is not None:
            # A longer word, such as a path, stays whole: it is copied.
            parts = wrap(line, width, break_long_words=False, break_on_hyphens=False) or [""]
        for part in parts:
            console.print(part, soft_wrap=True)


def warn(text: str) -> None:
    """Print a line on stderr, where it is in no program's input."""
    PlainConsole(stderr=True).print(text, soft_wrap=True)


def tell(value: Any, *lines: str, as_json: bool) -> None:
    """Print one JSON document for programs, or lines for people."""
    if as_json:
        print_json(value)
    else:
        print_line("\n".join(lines))


def _cell(value: Any, *, whole: bool = False) -> str:
    if value is None:
        return ""
    if isinstance(value, datetime):
        return f"{value:%m-%d %H:%M:%S}"
    if isinstance(value, Enum):
        return value.name
    # The first line of an error has its type and its message.
    text = visible(str(value).partition("\n")[0])
    if whole or len(text) <= SHOWN_TEXT:
        return text
    start = text[: SHOWN_TEXT - 3]
    return (start.rpartition(" ")[0] or start) + "..."


@contextmanager
def progress(title: str, total: int | None = None) -> Iterator[Callable[..., None]]:
    """Show a progress bar on stderr, if that is a terminal; yields the function that moves it, by
    the arguments of Rich's `Progress.update`.
    """
    from rich.progress import (  # noqa: PLC0415 - most commands show none
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
    )

    text = TextColumn("{task.description}")
    columns = (text, BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    console = PlainConsole(stderr=True)
    shown = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
    with shown as bar:
        yield partial(bar.update, bar.add_task(title, total=total))


def ask(text: str, *, as_json: bool) -> None:
    """Show the text and go on only if the answer is yes.

    Raises:
        SetupError: with JSON the answer would be in the output.
    """
    refuse_json(as_json)
    if text:
        print_line(text)
    typer.confirm("Go on?", abort=True)


def refuse_json(as_json: bool) -> None:
    """Refuse to ask where the output is for a program.

    Raises:
        SetupError: it is.
    """
    if as_json:
        raise SetupError("--json does not ask: give --yes, too, or --dry-run if there is one")
