"""Turn a row of the archive into the message that is published again; pure functions."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from faststream_sqlbroker.core.checks import name_problem
from faststream_sqlbroker.core.settle import ARCHIVED_BEFORE, DEAD_LETTER
from faststream_sqlbroker.core.text import changed_headers, load_headers, short
from faststream_sqlbroker.exceptions import PublishError

SCOPE = "replay:"
"""In the policy state, the scope of the marks of a replay is this and its name; the key is the id
of the row that was copied. Who inserts the mark publishes the copy, in the same transaction."""
REPLAY_OF_HEADER = "replay-of"
"""Header with the id of the row that a message is a copy of."""
REPLAY_JOB_HEADER = "replay-job"
"""Header with the job that published it."""

PRIORITIES = range(-100, 101)

_UNSTORABLE = re.compile(r"(?<!\\)(?:\\\\)*\\u(?:0000|[dD][89a-fA-F][0-9a-fA-F]{2})")
_PAIR = re.compile(r"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}")


@dataclass(frozen=True)
class Plan:
    """What is done with every row.

    Attributes:
        job: The name under which rows are remembered.
        queue: Where all rows go; None leaves each in its own queue.
        headers: Put over each row's headers; None takes a header away.
    """

    job: str
    queue: str | None
    headers: Mapping[str, Any]


@dataclass(frozen=True)
class Copy:
    """A message to be published.

    Attributes:
        origin: Id of the row that it is a copy of.
        bytes: Length of its payload.
        values: Columns of the message table; the times, and in a dry run the payload, are missing.
    """

    origin: int
    bytes: int
    values: dict[str, Any]

    @property
    def queue(self) -> str:
        """Where it goes."""
        return str(self.values["queue"])


def copy_row(row: Mapping[str, Any], plan: Plan) -> Copy:
    """The message that `row` becomes.

    Args:
        row: id, queue, priority, key, headers, publish_count, bytes (of the payload), and payload
            if it is to be written.
        plan: What is done with every row.

    Raises:
        PublishError: a value that no message can have; says which, and the id of the row.
    """
    origin = row["id"]
    if origin is None:
        raise PublishError("a row has no id: replay takes rows of the archive, each with its id")
    values = {
        "queue": _name(origin, "queue", row["queue"] if plan.queue is None else plan.queue),
        "priority": _priority(origin, row["priority"]),
        "key": None if row["key"] is None else _name(origin, "key", row["key"]),
        "headers": _headers(origin, row["headers"], plan),
        "publish_count": 1 + (row["publish_count"] or 1),
        "origin_id": origin,
    }
    if row["bytes"] is None:
        raise PublishError(
            f"row {origin} has no payload: select the column payload too, or leave the row out"
        )
    if "payload" in row:
        values["payload"] = row["payload"]
    return Copy(origin, row["bytes"], values)


def _name(origin: int, option: str, value: object) -> str:
    if (problem := name_problem(value)) is not None:
        raise PublishError(f"row {origin}: its {option} cannot be {short(value)}: {problem}")
    return str(value)


def _priority(origin: int, value: object) -> int:
    if not isinstance(value, int) or value not in PRIORITIES:
        first = PRIORITIES[0]
        last = PRIORITIES[-1]
        raise PublishError(
            f"row {origin}: its priority must be from {first} to {last}, got {value!r}"
        )
    return value


def _headers(origin: int, stored: Any, plan: Plan) -> dict[str, Any]:
    # These two tell where and when the row ended; its copy has not ended.
    ended = {DEAD_LETTER: None, ARCHIVED_BEFORE: None}
    changes = {**ended, **plan.headers, REPLAY_OF_HEADER: origin, REPLAY_JOB_HEADER: plan.job}
    headers = changed_headers(load_headers(stored), changes)
    check_headers(f"row {origin}: its headers", headers)
    return headers


def check_headers(what: str, headers: Mapping[str, Any]) -> None:
    """Refuse headers that some database cannot store.

    Raises:
        PublishError: a name that is no string, a value that is no JSON, or a character that
            PostgreSQL's JSON cannot hold; begins with `what`.
    """
    for name in headers:
        if not isinstance(name, str):
            raise PublishError(f"{what} must have strings as names, got {name!r}")
    try:
        text = json.dumps(headers, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise PublishError(f"{what} must be JSON values: {error}") from error
    if _UNSTORABLE.search(_PAIR.sub("", text)):
        raise PublishError(
            f"{what} must not hold a NUL character or a lone surrogate, got {short(headers)}"
        )
