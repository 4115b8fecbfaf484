"""Output of commands: JSON for programs, tables for people.

Names and texts from outside are printed as plain text and cannot control the terminal.
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
from faststream_sqlbroker.core.text import replace_invisible
from faststream_sqlbroker.exceptions import SetupError


class PlainConsole(Console):
    """A console for plain text: no markup, emoji codes, colours or control characters.

    Args:
        stderr: Print to stderr instead of stdout.
        width: Characters per line; None for the width of the terminal.
    """

    def __init__(self, *, stderr: bool = False, width: int | None = None) -> None:
        super().__init__(stderr=stderr, width=width, markup=False, emoji=False, highlight=False)

    def render_str(self, text: str, **options: Any) -> Text:
        """Render lines, cells and titles, with U+FFFD in place of invisible characters."""
        return super().render_str(replace_invisible(text), **options)


AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Skip the confirmation.")]
MAX_DEPTH = 100
"""Levels of JSON that are printed; Python's encoder fails at some three hundred."""
MAX_CELL_TEXT = 60
"""Characters of a text in a cell."""
ID_COLUMNS = frozenset({"id", "fingerprint", "worker"})
"""Columns whose values are passed to other commands."""
MIN_COLUMN_WIDTH = 16
"""Characters of a column that is still easy to read; narrower columns are never folded."""
MAX_UNFOLDED_WORD = 30
"""Characters of the longest word that a column never folds."""
UNLIMITED_WIDTH = 10_000
"""Characters of a line that a program reads."""
COLUMN_GAP = 2
"""Spaces between columns."""


def print_json(value: Any, indent: int | None = 2) -> None:
    """Print a JSON document, with ISO 8601 times and escaped bytes; None as indent: on one line."""
    # Escaped to ASCII, so that control characters of a message cannot control the terminal.
    typer.echo(json.dumps(_to_portable_json(value), default=_convert_value, indent=indent))


def print_error(text: str, kind: str, exit_code: int) -> None:
    """Print an error as a line of JSON on stderr; stdout has results only.

    `kind` is the name of the error's class, `exit_code` the code with which the command ends.
    """
    document = {"error": text, "type": kind, "exit_code": exit_code}
    typer.echo(json.dumps(document), err=True)


def _to_portable_json(value: Any, levels: int = MAX_DEPTH) -> Any:
    """Replace values that some JSON readers reject.

    NaN and Infinity become text, and values nested too deeply become "...". `levels` counts down
    the levels that may still follow.
    """
    if isinstance(value, float) and not math.isfinite(value):
        return json.dumps(value)
    if not isinstance(value, dict | list | tuple):
        return value
    if not levels:
        return "..."
    if isinstance(value, dict):
        return {name: _to_portable_json(item, levels - 1) for name, item in value.items()}
    return [_to_portable_json(item, levels - 1) for item in value]


def _convert_value(value: Any) -> Any:
    """Convert a value that the JSON encoder does not know; it calls this for each such value.

    Bytes that are not UTF-8 are shown as escapes.
    """
    if isinstance(value, datetime):
        return value.isoformat()
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, bytes):
        return value.decode(errors="backslashreplace")
    return str(value)


def to_json_dict(value: Any) -> dict[str, Any]:
    """Convert a dataclass to a JSON object, without fields that `repr` omits.

    Such fields are internal or may hold secrets.
    """
    return {
        field.name: _convert_field(getattr(value, field.name))
        for field in fields(value)
        if field.repr
    }


def _convert_field(value: Any) -> Any:
    """Convert the value of a dataclass field, and dataclasses directly inside of it.

    Other values are left to the JSON encoder, which calls `_convert_value` for unknown types.
    """
    # States are also strings, so JSON would write their value instead of their name.
    if isinstance(value, Enum):
        return value.name
    if is_dataclass(value) and not isinstance(value, type):
        return to_json_dict(value)
    if isinstance(value, Mapping):
        return dict(value)
    # Convert one level only, because a body may be nested arbitrarily deeply.
    if isinstance(value, tuple | list):
        return [to_json_dict(item) if is_dataclass(item) else item for item in value]
    return value


def print_table(
    title: str, columns: Sequence[str], rows: Iterable[Sequence[Any]], *, full_text: bool = False
) -> None:
    """Print a table with numbers aligned right; `full_text` keeps texts uncut.

    On a terminal the table fits its width; a program gets each row on one line.
    """
    width = _get_width()
    table = build_table(columns, rows, full_text=full_text, width=width)
    if title:
        print_line(title)
    PlainConsole(width=UNLIMITED_WIDTH if width is None else width).print(table)


def _get_width() -> int | None:
    """Return the characters per line for people, or None if a program reads the output.

    The variable COLUMNS sets a width even if the output is no terminal. Without a width no line is
    folded.
    """
    console = PlainConsole()
    return console.width if console.is_terminal or "COLUMNS" in os.environ else None


def build_table(
    columns: Sequence[str],
    rows: Iterable[Sequence[Any]],
    *,
    full_text: bool = False,
    width: int | None = None,
) -> Table:
    """Build a table that keeps words whole in a line of `width` characters.

    Each column first gets the minimum width that keeps its words whole. The spare characters then
    widen the columns from the last to the first. If even the minimum widths do not fit, each row
    becomes several lines with one column and its value per line. Without a width nothing is folded.
    """
    row_values = [list(row) for row in rows]
    cells = [[_format_cell(value, full_text=full_text) for value in row] for row in row_values]
    texts = [[name, *(row[index] for row in cells)] for index, name in enumerate(columns)]
    widths = [max(map(cell_len, column)) for column in texts]
    if width is not None:
        min_widths = [
            _find_min_width(column, max_width)
            for column, max_width in zip(texts, widths, strict=True)
        ]
        spare = width - sum(min_widths) - COLUMN_GAP * len(min_widths)
        if spare < 0:
            return _build_record_table(columns, cells, width)
        # The last column usually matters most.
        for index, max_width in reversed(list(enumerate(widths))):
            widths[index] = min(max_width, min_widths[index] + spare)
            spare -= widths[index] - min_widths[index]
    table = Table(box=None, padding=(0, COLUMN_GAP, 0, 0))
    for index, name in enumerate(columns):
        is_numeric = all(isinstance(row[index], int | float | Count) for row in row_values)
        justify: Literal["left", "right"] = "right" if row_values and is_numeric else "left"
        table.add_column(name, justify=justify, overflow="fold", width=widths[index])
    for row in cells:
        table.add_row(*row)
    return table


def _find_min_width(texts: Sequence[str], max_width: int) -> int:
    """Return the minimum width of a column; `texts` are the name and the cells.

    `max_width` is the length of the longest text.
    """
    # A folded id could not be copied.
    if texts[0] in ID_COLUMNS:
        return max_width
    word_widths = (cell_len(word) for text in texts for word in text.split())
    return max(
        min(max_width, MIN_COLUMN_WIDTH), min(max(word_widths, default=0), MAX_UNFOLDED_WORD)
    )


def _build_record_table(
    columns: Sequence[str], cells: Sequence[Sequence[str]], width: int
) -> Table:
    """Build a table with a line "column value" per value, for a terminal that is too narrow.

    Empty values are omitted, and an empty line separates the rows.
    """
    table = Table(box=None, padding=(0, COLUMN_GAP, 0, 0), show_header=False)
    name_width = max(map(cell_len, columns))
    table.add_column(width=name_width)
    table.add_column(
        overflow="fold", width=max(width - name_width - 2 * COLUMN_GAP, MIN_COLUMN_WIDTH)
    )
    for index, row in enumerate(cells):
        if index:
            table.add_row()
        for name, text in zip(columns, row, strict=True):
            if text:
                table.add_row(name, text)
    return table


def print_line(text: str) -> None:
    """Print the lines of `text`; on a terminal, fold them between words.

    Names and errors from outside may be in the text: markup and control characters have no effect.
    """
    console = PlainConsole()
    width = _get_width()
    for line in text.splitlines():
        parts = [line]
        if width is not None:
            # A longer word, such as a path, is not folded, so that it can be copied.
            parts = wrap(line, width, break_long_words=False, break_on_hyphens=False) or [""]
        for part in parts:
            console.print(part, soft_wrap=True)


def warn(text: str) -> None:
    """Print a line on stderr, outside of the output that programs read."""
    PlainConsole(stderr=True).print(text, soft_wrap=True)


def warn_if_cut(items: Sequence[Any], limit: int, remedy: str = "raise --limit") -> None:
    """Warn on stderr if a list has as many items as its limit, and so may be cut."""
    if len(items) >= limit:
        warn(f"there may be more than {limit:,}: {remedy}")


def print_result(value: Any, *lines: str, as_json: bool) -> None:
    """Print `value` as a JSON document with `as_json`, or else `lines`."""
    if as_json:
        print_json(value)
    else:
        print_line("\n".join(lines))


def _format_cell(value: Any, *, full_text: bool = False) -> str:
    """Format a value as a single line, cut at a word unless `full_text`.

    Times are in the zone of the value, UTC here, without the year; None is an empty cell.
    """
    if value is None:
        return ""
    if isinstance(value, datetime):
        return f"{value:%m-%d %H:%M:%S}"
    if isinstance(value, Enum):
        return value.name
    # The first line of an error has the type and the message.
    text = replace_invisible(str(value).partition("\n")[0])
    if full_text or len(text) <= MAX_CELL_TEXT:
        return text
    start = text[: MAX_CELL_TEXT - 3]
    return (start.rpartition(" ")[0] or start) + "..."


@contextmanager
def show_progress(title: str, total: int | None = None) -> Iterator[Callable[..., None]]:
    """Show a progress bar on stderr if stderr is a terminal.

    Yields the function that updates the bar, with the arguments of Rich's `Progress.update`.
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
    display = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
    with display as bar:
        yield partial(bar.update, bar.add_task(title, total=total))


def confirm_or_abort(text: str, *, as_json: bool) -> None:
    """Show `text` and continue only after a yes.

    Raises:
        SetupError: `--json` was given, so a question would corrupt the output.
    """
    refuse_json(as_json)
    if text:
        print_line(text)
    typer.confirm("Continue?", abort=True)


def refuse_json(as_json: bool) -> None:
    """Refuse to ask a question when the output is JSON.

    Raises:
        SetupError: `--json` was given.
    """
    if as_json:
        raise SetupError("--json cannot ask for confirmation: add --yes, or --dry-run if available")
