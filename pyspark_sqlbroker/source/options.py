"""The options of the format "sqlbroker": Spark passes them as text; they are checked and parsed."""

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, TypeVar

from sqlalchemy import URL, make_url
from sqlalchemy.exc import ArgumentError

from faststream_sqlbroker.core.checks import one_of, whole_number
from faststream_sqlbroker.core.times import positive_seconds, seconds_or_zero
from faststream_sqlbroker.exceptions import SetupError
from pyspark_sqlbroker.address import Address, parse_address
from pyspark_sqlbroker.load.selection import ARCHIVE, MESSAGES, Selection, select_rows
from pyspark_sqlbroker.moments import parse_moment

BOTH = (
    "url",
    "user",
    "password",
    "passwordEnv",
    "kind",
    "table",
    "schema",
    "queues",
    "states",
    "numPartitions",
    "fetchSize",
)
BATCH = ("since", "until")
STREAM = (
    "startingTimestamp",
    "safetyLag",
    "primary",
    "maxRowsPerTrigger",
    "maxWindowPerTrigger",
    "failOnDataLoss",
)
KINDS = {"archive": ARCHIVE, "messages": MESSAGES}
EARLIEST = "earliest"
FETCH_ROWS = 10_000
"""Rows of a batch that is handed to Spark, where fetchSize does not say."""

MOST_PARTITIONS = 1000
"""The largest numPartitions: each is a connection to the database."""

T = TypeVar("T")


@dataclass(frozen=True)
class Options:
    """What was asked for; no password shows in its repr.

    Attributes:
        address: Where the database is.
        kind: "archive" or "messages".
        selection: Which rows.
        num_partitions: Connections that read at the same time; None is chosen by size.
        fetch_rows: Most rows of a batch that is handed to Spark.
        start: Where a new stream begins; None is the oldest row.
        safety_lag: Seconds, as `find_horizon` takes them.
        primary: URL of the standby's primary.
        max_rows: Most rows of a micro-batch; None is any number.
        max_window: Most seconds of `archived_at` in a micro-batch; None is any.
        fail_on_data_loss: Whether a stream fails when rows may have been pruned before it read
            them, as no row of its queues from before its window is left.
    """

    address: Address
    kind: str
    selection: Selection
    num_partitions: int | None
    fetch_rows: int
    start: datetime | None
    safety_lag: float
    primary: URL | None = field(repr=False)
    max_rows: int | None
    max_window: float | None
    fail_on_data_loss: bool


def parse_options(given: Mapping[str, str], *, streaming: bool | None = None) -> Options:
    """Check the options, whatever the case of their names.

    Args:
        given: As Spark has them. `path`, the argument of `load`, is another name of `table`.
        streaming: What they are for; None if that is not known yet.

    Raises:
        SetupError: an unknown name, one of the other way of reading, or a value that cannot be; it
            says which are allowed and repeats neither URL nor password.
        NotSupportedError: another database.
    """
    found = _named(given, streaming)
    url = _url(found, "url")
    if url is None:
        raise SetupError(
            'the option "url" is missing: give a SQLAlchemy URL, like postgresql://user@host/name, '
            'and the password by the option "password" or "passwordEnv"'
        )
    kind = found.get("kind", "archive").lower()
    one_of("kind", kind, tuple(KINDS))
    start = found.get("startingTimestamp", EARLIEST)
    return Options(
        address=parse_address(_with_credentials(url, found)),
        kind=kind,
        selection=_selection(kind, found),
        num_partitions=_get(found, "numPartitions", _number_of_partitions, None),
        fetch_rows=_get(found, "fetchSize", _number, FETCH_ROWS),
        start=None if start.lower() == EARLIEST else parse_moment("startingTimestamp", start),
        safety_lag=_get(found, "safetyLag", seconds_or_zero, 300.0),
        primary=_primary(found, _with_credentials(url, found)),
        max_rows=_get(found, "maxRowsPerTrigger", _number, None),
        max_window=_get(found, "maxWindowPerTrigger", positive_seconds, None),
        fail_on_data_loss=_get(found, "failOnDataLoss", _flag, True),
    )


def _named(given: Mapping[str, str], streaming: bool | None) -> dict[str, str]:
    """The options by their proper names."""
    names = {name.lower(): name for name in (*BOTH, *BATCH, *STREAM)} | {"path": "table"}
    found: dict[str, str] = {}
    for name, value in given.items():
        proper = names.get(name.lower())
        if proper is None:
            raise SetupError(
                f"the option {name!r} is unknown; allowed are {', '.join(BOTH)}; of batches "
                f"{', '.join(BATCH)}; of streams {', '.join(STREAM)}"
            )
        if found.get(proper, value) != value:
            raise SetupError(
                "the table is named twice, by load(…) and by the option: leave one out"
            )
        found[proper] = value
    others = {None: (), True: BATCH, False: STREAM}[streaming]
    wrong = [name for name in others if name in found]
    if wrong:
        way, other = ("readStream", BATCH) if streaming else ("read", STREAM)
        allowed = ", ".join((*BOTH, *(STREAM if other is BATCH else BATCH)))
        raise SetupError(f"the option {wrong[0]!r} is not for spark.{way}; allowed are {allowed}")
    return found


def _selection(kind: str, found: Mapping[str, str]) -> Selection:
    return select_rows(
        KINDS[kind],
        found.get("table"),
        found.get("schema"),
        since=found.get("since"),
        until=found.get("until"),
        queues=_get(found, "queues", _listed, None),
        states=_get(found, "states", _listed, None),
    )


def _get(found: Mapping[str, str], name: str, parse: Callable[[str, str], T], default: Any) -> Any:
    return parse(name, found[name]) if name in found else default


def _url(found: Mapping[str, str], name: str) -> URL | None:
    if name not in found:
        return None
    try:
        return make_url(found[name])
    except (ArgumentError, ValueError):
        # The cause is left out, because its text repeats the URL and its password.
        raise SetupError(
            f"the option {name!r} is no URL like postgresql://user@host/name"
        ) from None


def _with_credentials(url: URL, found: Mapping[str, str]) -> URL:
    if "password" in found and "passwordEnv" in found:
        raise SetupError("password and passwordEnv are both given: leave one out")
    password = found.get("password")
    if "passwordEnv" in found:
        password = os.environ.get(found["passwordEnv"])
        if password is None:
            raise SetupError(
                f"passwordEnv names {found['passwordEnv']!r}, which is not in the environment that "
                "the driver's Java was started with"
            )
    if "user" in found:
        url = url.set(username=found["user"])
    return url if password is None else url.set(password=password)


def _primary(found: Mapping[str, str], url: URL) -> URL | None:
    """With the credentials of the standby, unless it names a user itself."""
    primary = _url(found, "primary")
    if primary is None or primary.username is not None:
        return primary
    primary = primary.set(username=url.username)
    return primary if url.password is None else primary.set(password=url.password)


def _number(name: str, text: str) -> int:
    return whole_number(name, int(text) if text.strip().isdecimal() else text)


def _number_of_partitions(name: str, text: str) -> int | None:
    if text.lower() == "auto":
        return None
    value = int(text) if text.strip().isdecimal() else text
    return whole_number(name, value, most=MOST_PARTITIONS, other=' or "auto"')


def _flag(name: str, text: str) -> bool:
    one_of(name, text.lower(), ("true", "false"))
    return text.lower() == "true"


def _listed(name: str, text: str) -> tuple[str, ...]:
    """Names between commas, or a JSON list for names that hold commas."""
    if not text.lstrip().startswith("["):
        return tuple(part.strip() for part in text.split(",") if part.strip())
    try:
        values = json.loads(text)
    except ValueError:
        values = None
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        raise SetupError(
            f"{name} must be names between commas or a JSON list of texts, got {text!r}"
        )
    return tuple(values)
