"""Build the message that a replay publishes from a row of the archive. Pure functions."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from faststream_sqlbroker.core.checks import find_name_error
from faststream_sqlbroker.core.settle import ARCHIVED_BEFORE, DEAD_LETTER
from faststream_sqlbroker.core.text import format_value, load_headers, merge_headers
from faststream_sqlbroker.exceptions import PublishError

REPLAY_SCOPE = "replay:"
"""Scope prefix of a replay's marks in the policy state, followed by the replay's name; the key is
the id of the copied row. The process that inserts the mark publishes the copy in the same
transaction."""
REPLAY_OF_HEADER = "replay-of"
"""Header with the id of the row that the message was copied from."""
REPLAY_JOB_HEADER = "replay-job"
"""Header with the name of the replay that published the message."""

PRIORITIES = range(-100, 101)

_UNSTORABLE = re.compile(r"(?<!\\)(?:\\\\)*\\u(?:0000|[dD][89a-fA-F][0-9a-fA-F]{2})")
_PAIR = re.compile(r"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}")


@dataclass(frozen=True)
class ReplayPlan:
    """The options of a replay, applied to each row.

    Attributes:
        job: The name under which rows are remembered.
        queue: Target of all rows; None leaves each row in its own queue.
        headers: Changes to each row's headers; None removes a header.
    """

    job: str
    queue: str | None
    headers: Mapping[str, Any]


@dataclass(frozen=True)
class ReplayCopy:
    """A message to publish.

    Attributes:
        origin: Id of the copied row.
        bytes: Length of the payload.
        values: Columns of the message table, without the times and, in a dry run, without the
            payload.
    """

    origin: int
    bytes: int
    values: dict[str, Any]

    @property
    def queue(self) -> str:
        """The target queue."""
        return str(self.values["queue"])


def copy_row(row: Mapping[str, Any], plan: ReplayPlan) -> ReplayCopy:
    """Build the message for `row`, a row of the archive.

    A replay publishes archived messages again, as copies with ids of their own.

    Args:
        row: id, queue, priority, key, headers, publish_count, bytes (of the payload), and payload
            if it is to be written.
        plan: The options of the replay.

    Raises:
        PublishError: a value is invalid for a message; the text names the value and the row's id.
    """
    origin = row["id"]
    if origin is None:
        raise PublishError("a row has no id: select the column id of the archive too")
    values = {
        "queue": _validate_name(
            origin, "queue", row["queue"] if plan.queue is None else plan.queue
        ),
        "priority": _validate_priority(origin, row["priority"]),
        "key": None if row["key"] is None else _validate_name(origin, "key", row["key"]),
        "headers": _build_headers(origin, row["headers"], plan),
        "publish_count": 1 + (row["publish_count"] or 1),
        "origin_id": origin,
    }
    if row["bytes"] is None:
        raise PublishError(
            f"row {origin} has no payload: select the column payload too, or omit the row"
        )
    if "payload" in row:
        values["payload"] = row["payload"]
    return ReplayCopy(origin, row["bytes"], values)


def _validate_name(origin: int, option: str, value: object) -> str:
    """Return a valid queue or key of row `origin`, or raise PublishError."""
    if (error := find_name_error(value)) is not None:
        raise PublishError(f"row {origin}: its {option} cannot be {format_value(value)}: {error}")
    return str(value)


def _validate_priority(origin: int, value: object) -> int:
    """Return the priority of row `origin`; raise PublishError outside of the column's range."""
    if not isinstance(value, int) or value not in PRIORITIES:
        first = PRIORITIES[0]
        last = PRIORITIES[-1]
        raise PublishError(
            f"row {origin}: its priority must be from {first} to {last}, got {value!r}"
        )
    return value


def _build_headers(origin: int, stored: Any, plan: ReplayPlan) -> dict[str, Any]:
    """Build the headers of the copy from the headers of row `origin` and the plan's changes.

    Two more headers name the copied row and the replay.
    """
    # Remove the headers about the row's end, because the copy has not ended.
    end_headers = {DEAD_LETTER: None, ARCHIVED_BEFORE: None}
    changes = {**end_headers, **plan.headers, REPLAY_OF_HEADER: origin, REPLAY_JOB_HEADER: plan.job}
    headers = merge_headers(load_headers(stored), changes)
    check_headers(f"row {origin}: its headers", headers)
    return headers


def check_headers(label: str, headers: Mapping[str, Any]) -> None:
    """Refuse headers that some database cannot store.

    Raises:
        PublishError: a name is not a string, a value is not JSON, or a character cannot be stored
            by PostgreSQL's JSON; the text begins with `label`.
    """
    for name in headers:
        if not isinstance(name, str):
            raise PublishError(f"{label} must have strings as names, got {name!r}")
    try:
        text = json.dumps(headers, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise PublishError(f"{label} must be JSON values: {error}") from error
    # A complete surrogate pair is a character that can be stored.
    if _UNSTORABLE.search(_PAIR.sub("", text)):
        raise PublishError(
            f"{label} must not contain a NUL character or a lone surrogate, got "
            f"{format_value(headers)}"
        )
