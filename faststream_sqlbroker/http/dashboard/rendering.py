"""Templates become pages: everything that they show is escaped. With the words of the pages, and
the positions of what they draw as SVG.
"""

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
from faststream_sqlbroker.core.times import length_text as known_length

LONGEST_BODY = 100_000
"""Characters of a body that a page shows."""


def environment() -> Environment:
    """The templates of this package."""
    made = Environment(
        loader=PackageLoader("faststream_sqlbroker.http.dashboard"),
        # Of all templates, whatever their names end with.
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=escaped,
    )
    made.filters |= {
        "when": when,
        "length": length_text,
        "count": count_text,
        "rate": rate_text,
        "status": status_text,
        "fact": fact_text,
        "body": body_text,
        "query": query_text,
        "size": len,
        "plain_schedule": plain_schedule,
        "spark": spark_points,
    }
    return made


_UNSEEN = re.compile(
    "[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]"
)


def escaped(value: Any) -> Any:
    """A text as pages show it: what would reorder or hide what stands around it is escaped."""
    if type(value) is not str:
        return value
    return _UNSEEN.sub(lambda found: f"\\u{ord(found[0]):04x}", value)


def when(at: datetime | float | None) -> Markup | str:
    """A moment, for people and for programs; or seconds before the database's now."""
    if at is None:
        return "–"
    if not isinstance(at, datetime):
        return f"{length_text(at)} ago"
    element = '<time datetime="{}">{}</time>'
    return Markup(element).format(at.isoformat(), f"{at:%Y-%m-%d %H:%M:%S} UTC")  # noqa: S704


def length_text(seconds: float | None) -> str:
    """A length of time, rounded."""
    return "–" if seconds is None else known_length(seconds)


def count_text(count: Count | int) -> str:
    """A number with separators, and whether it is an estimate."""
    if isinstance(count, int):
        return f"{count:,}"
    return f"{count.value:,}" if count.exact else f"{count.how} {count.value:,}"


def rate_text(rate: float | None) -> str:
    """Messages a minute; None: not known."""
    return "–" if rate is None else f"{rate:,.10g}"


def status_text(queue: QueueOverview) -> str:
    """What a list of queues says of one besides numbers; empty if nothing."""
    paused = "paused" if queue.paused is not None else ""
    return str(escaped("; ".join(text for text in (paused, queue.problem) if text)))


def fact_text(value: Any) -> str:
    """A fact of the diagnosis: a text, a number, a list, or a mapping of these."""
    if value is None or value in ([], (), {}):
        return "–"
    if isinstance(value, Mapping):
        return ", ".join(f"{name}: {fact_text(each)}" for name, each in value.items())
    if isinstance(value, list | tuple):
        between = "; " if isinstance(value[0], Mapping) else ", "
        return between.join(fact_text(each) for each in value)
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value)


def body_text(body: Any) -> str:
    """A body or a header: JSON indented, text as it is, bytes in hexadecimal."""
    if isinstance(body, str):
        found = body
    elif isinstance(body, bytes):
        found = f"{len(body)} bytes: {body[:LONGEST_BODY].hex(' ')}"
    else:
        found = _indented(body)
    if len(found) <= LONGEST_BODY:
        return found
    return f"{found[:LONGEST_BODY]}\n… and more: a page shows {LONGEST_BODY:,} characters"


def _indented(body: Any) -> str:
    """The beginning of it as JSON.

    It is made in Python: all of it could hold up all else that this process does for seconds.
    """
    encoder = json.JSONEncoder(indent=2, ensure_ascii=False, default=str)
    parts: list[str] = []
    size = 0
    for part in encoder.iterencode(body):
        parts.append(part)
        size += len(part)
        if size > LONGEST_BODY:
            break
    return "".join(parts)


def query_text(values: Mapping[str, Any]) -> str:
    """Parameters of an address, without those that are None or empty."""
    return urlencode({name: value for name, value in values.items() if value not in {None, ""}})


_SOME_DAY = datetime(2024, 1, 1, tzinfo=timezone.utc)


def plain_schedule(expression: str) -> str:
    """When a cron expression fires, in words; the expression itself without the extra `schedule`.

    The table may hold what another program has written, so nothing is raised.
    """
    # Without the extra, too: a dashboard must not need what only declares schedules.
    try:
        from cronsim import CronSim  # noqa: PLC0415 - an extra

        return str(CronSim(expression, _SOME_DAY).explain())
    except Exception:  # noqa: BLE001 - cronsim raises errors of several kinds for odd texts
        return expression


WIDTH = 120
"""Of a sparkline, in its own units."""
HEIGHT = 24
"""Of it, too."""


def spark_points(values: Sequence[int]) -> str:
    """The points of a polyline that shows `values` from left to right."""
    if not values:
        return ""
    highest = max(*values, 1)
    step = WIDTH / max(len(values) - 1, 1)
    return " ".join(
        f"{n * step:.1f},{HEIGHT - 1 - (HEIGHT - 2) * value / highest:.1f}"
        for n, value in enumerate(values)
    )


def state_times(message: StoredMessage) -> dict[str, datetime | None]:
    """Return the times at which the message came to its states, as far as its row tells."""
    times: dict[str, datetime | None] = {
        "PENDING": message.created_at,
        "PROCESSING": message.acquired_at,
    }
    if message.state is MessageState.RETRYABLE:
        times["RETRYABLE"] = message.last_attempt_at
    if message.archived_at is not None:
        times[message.state.name] = message.archived_at
    return times
