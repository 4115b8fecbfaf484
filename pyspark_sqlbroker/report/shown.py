"""How a page shows values and tables."""

from collections.abc import Iterable, Sequence
from datetime import datetime

from pyspark_sqlbroker.report.drawing import escaped


class Html(str):
    """Text that is HTML already; all other text is escaped."""

    __slots__ = ()


def table(kind: str, names: Iterable[str], rows: Iterable[Sequence[str]]) -> str:
    """A table whose class is `kind`."""
    head = "".join(f"<th>{name}</th>" for name in names)
    body = "".join("<tr>" + "".join(map(_cell, row)) + "</tr>" for row in rows)
    return (
        f'<div class="wide"><table class="{kind}"><thead><tr>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


def _cell(value: str) -> str:
    return f"<td>{value if isinstance(value, Html) else escaped(value)}</td>"


def link(text: str, address: str) -> str:
    """A link, as HTML."""
    return f'<a href="{escaped(address)}">{escaped(text)}</a>'


def change(now: float | None, before: float | None) -> str:
    """How much more or less it is than before, as a share; nothing where that is no number."""
    return f" ({now / before - 1:+.0%})" if now is not None and before else ""


def show_moment(moment: datetime | None) -> str:
    """In UTC, to the second."""
    return "–" if moment is None else f"{moment:%Y-%m-%d %H:%M:%S}"


def show_length(seconds: float | None) -> str:
    """Three figures and a unit."""
    if seconds is None:
        return "–"
    units = ((86_400.0, "d"), (3600.0, "h"), (60.0, "min"), (1.0, "s"), (1e-3, "ms"))
    size, unit = next(((size, unit) for size, unit in units if seconds >= size), (1e-6, "µs"))
    return f"{seconds / size:.3g} {unit}"


def show_bytes(number: float) -> str:
    """Four figures and a unit."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if number < 1024:  # noqa: PLR2004 - of a unit in the next
            return f"{number:.4g} {unit}"
        number /= 1024
    return f"{number:,.4g} TiB"
