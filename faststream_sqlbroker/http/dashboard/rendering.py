"""Templates, which escape all values, and their filters: texts, and points of SVG sparklines."""

import json
import re
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from typing import Any
from urllib.parse import urlencode

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from faststream_sqlbroker.core.overview import Count, QueueOverview
from faststream_sqlbroker.core.states import MessageState
from faststream_sqlbroker.core.stored import StoredMessage
from faststream_sqlbroker.core.times import format_duration as known_length

MAX_BODY = 100_000
"""Characters of a body on a page."""


def create_environment() -> Environment:
    """Create Jinja2's environment for this package's templates.

    Templates call the functions of this module as filters, by the names given here.
    """
    environment = Environment(
        loader=PackageLoader("faststream_sqlbroker.http.dashboard"),
        # For all templates, regardless of their suffix.
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=escape_invisible,
    )
    environment.filters |= {
        "when": format_time,
        "length": format_length,
        "count": format_count,
        "rate": format_rate,
        "status": format_status,
        "fact": format_fact,
        "body": format_body,
        "query": format_query,
        "size": len,
        "plain_schedule": describe_schedule,
        "spark": compute_spark_points,
    }
    return environment


_INVISIBLE = re.compile(
    "[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]"
)


def escape_invisible(value: Any) -> Any:
    """Escape characters that would reorder or hide the surrounding text."""
    if type(value) is not str:
        return value
    return _INVISIBLE.sub(lambda match: f"\\u{ord(match[0]):04x}", value)


def format_time(at: datetime | float | None) -> Markup | str:
    """Format a time for people and programs, or a number of seconds before the database's now."""
    if at is None:
        return "–"
    if not isinstance(at, datetime):
        return f"{format_length(at)} ago"
    element = '<time datetime="{}">{}</time>'
    return Markup(element).format(at.isoformat(), f"{at:%Y-%m-%d %H:%M:%S} UTC")  # noqa: S704


def format_length(seconds: float | None) -> str:
    """Format a rounded length of time."""
    return "–" if seconds is None else known_length(seconds)


def format_count(count: Count | int) -> str:
    """Format a number with separators, and mark an estimate."""
    if isinstance(count, int):
        return f"{count:,}"
    return f"{count.value:,}" if count.is_exact else f"{count.how} {count.value:,}"


def format_rate(rate: float | None) -> str:
    """Format messages per minute; None is unknown."""
    return "–" if rate is None else f"{rate:,.10g}"


def format_status(queue: QueueOverview) -> str:
    """Format the status of a queue in a list; empty if there is nothing to report."""
    paused = "paused" if queue.paused is not None else ""
    return str(escape_invisible("; ".join(text for text in (paused, queue.problem) if text)))


def format_fact(value: Any) -> str:
    """Format a fact of the diagnosis: a text, a number, a list, or a mapping."""
    if value is None or value in ([], (), {}):
        return "–"
    if isinstance(value, Mapping):
        return ", ".join(f"{name}: {format_fact(item)}" for name, item in value.items())
    if isinstance(value, list | tuple):
        separator = "; " if isinstance(value[0], Mapping) else ", "
        return separator.join(format_fact(item) for item in value)
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value)


def format_body(body: Any) -> str:
    """Format a body or a header: indented JSON, plain text, or bytes in hexadecimal."""
    if isinstance(body, str):
        text = body
    elif isinstance(body, bytes):
        text = f"{len(body)} bytes: {body[:MAX_BODY].hex(' ')}"
    else:
        text = _format_json(body)
    if len(text) <= MAX_BODY:
        return text
    return f"{text[:MAX_BODY]}\n… truncated: a page shows {MAX_BODY:,} characters"


def _format_json(body: Any) -> str:
    """Return the beginning of `body` as JSON.

    The encoder is Python's, part by part: encoding a large body at once could block the process
    for seconds.
    """
    encoder = json.JSONEncoder(indent=2, ensure_ascii=False, default=str)
    parts: list[str] = []
    size = 0
    for part in encoder.iterencode(body):
        parts.append(part)
        size += len(part)
        if size > MAX_BODY:
            break
    return "".join(parts)


def format_query(values: Mapping[str, Any]) -> str:
    """Return a query string, without parameters that are None or empty."""
    return urlencode({name: value for name, value in values.items() if value not in {None, ""}})


_EXAMPLE_TIME = datetime(2024, 1, 1, tzinfo=timezone.utc)


def describe_schedule(expression: str) -> str:
    """Describe a cron expression; without the extra `schedule` return the expression itself.

    Nothing is raised, because the table may hold expressions of another program.
    """
    # Optional: a dashboard must not need an extra that only declares schedules.
    try:
        from cronsim import CronSim  # noqa: PLC0415 - an extra

        return str(CronSim(expression, _EXAMPLE_TIME).explain())
    except Exception:  # noqa: BLE001 - cronsim raises errors of several kinds for odd texts
        return expression


WIDTH = 120
"""Width of a sparkline in its own units."""
HEIGHT = 24
"""Height of a sparkline in its own units."""


def compute_spark_points(values: Sequence[int]) -> str:
    """Return the points of a polyline for `values`, from left to right.

    A sparkline is a small chart in SVG, where y grows downwards.
    """
    if not values:
        return ""
    max_value = max(*values, 1)
    step = WIDTH / max(len(values) - 1, 1)
    return " ".join(
        f"{n * step:.1f},{HEIGHT - 1 - (HEIGHT - 2) * value / max_value:.1f}"
        for n, value in enumerate(values)
    )


def get_state_times(message: StoredMessage) -> dict[str, datetime | None]:
    """Return the known times at which the message entered a state."""
    times: dict[str, datetime | None] = {
        "PENDING": message.created_at,
        "PROCESSING": message.acquired_at,
    }
    if message.state is MessageState.RETRYABLE:
        times["RETRYABLE"] = message.last_attempt_at
    if message.archived_at is not None:
        times[message.state.name] = message.archived_at
    return times
