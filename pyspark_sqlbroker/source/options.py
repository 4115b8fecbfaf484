"""The options of the format "sqlbroker": Spark passes them as text; they are checked and parsed."""

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, TypeVar

from sqlalchemy import URL, make_url
from sqlalchemy.exc import ArgumentError

from faststream_sqlbroker.core.checks import check_choice, validate_integer
from faststream_sqlbroker.core.times import parse_non_negative, parse_positive
from faststream_sqlbroker.exceptions import SetupError
from pyspark_sqlbroker.address import Address, parse_address
from pyspark_sqlbroker.load.selection import ARCHIVE, MESSAGES, Selection, select_rows
from pyspark_sqlbroker.moments import parse_time

COMMON_OPTIONS = (
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
BATCH_OPTIONS = ("since", "until")
STREAM_OPTIONS = (
    "startingTimestamp",
    "safetyLag",
    "primary",
    "maxRowsPerTrigger",
    "maxWindowPerTrigger",
    "failOnDataLoss",
)
LAYOUTS = {"archive": ARCHIVE, "messages": MESSAGES}
EARLIEST = "earliest"
DEFAULT_FETCH_ROWS = 10_000
"""Rows of a batch that Spark receives, unless fetchSize is given."""

MAX_NUM_PARTITIONS = 1000
"""Maximum numPartitions: each partition is a connection to the database."""

T = TypeVar("T")


@dataclass(frozen=True)
class SourceOptions:
    """Parsed options; no password shows in the repr.

    Attributes:
        address: Address of the database.
        kind: "archive" or "messages".
        selection: The rows to read.
        num_partitions: Number of connections that read at the same time; None is chosen by size.
        fetch_rows: Maximum number of rows of a batch that Spark receives.
        start: Start of a new stream; None is the oldest row.
        safety_lag: Seconds, as `find_horizon` takes them.
        primary: URL of the standby's primary.
        max_rows: Maximum number of rows of a micro-batch; None is any number.
        max_window: Maximum seconds of `archived_at` in a micro-batch; None is any.
        fail_on_data_loss: True if a stream fails when rows may have been pruned before it read
            them: no row of its queues from before its window is left. Only a stream of COMPLETED
            rows notices that one state was pruned while another keeps older rows.
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


def parse_options(
    raw_options: Mapping[str, str], *, streaming: bool | None = None
) -> SourceOptions:
    """Parse and check the options, whatever the case of their names.

    Args:
        raw_options: Spark's options. `path`, the argument of `load`, is another name of `table`.
        streaming: True for streams, False for batches; None if that is not known yet.

    Raises:
        SetupError: an unknown name, an option of the other way of reading, or an invalid value; the
            message lists the allowed options and repeats neither URL nor password.
        NotSupportedError: another database.
    """
    options = _normalize_names(raw_options, streaming)
    url = _parse_url(options, "url")
    if url is None:
        raise SetupError(
            'the option "url" is missing: give a SQLAlchemy URL, such as '
            'postgresql://user@host/name, and the password in the option "password" or '
            '"passwordEnv"'
        )
    kind = options.get("kind", "archive").lower()
    check_choice("kind", kind, tuple(LAYOUTS))
    start = options.get("startingTimestamp", EARLIEST)
    return SourceOptions(
        address=parse_address(_add_credentials(url, options)),
        kind=kind,
        selection=_parse_selection(kind, options),
        num_partitions=_get_option(options, "numPartitions", _parse_partitions, None),
        fetch_rows=_get_option(options, "fetchSize", _parse_number, DEFAULT_FETCH_ROWS),
        start=None if start.lower() == EARLIEST else parse_time("startingTimestamp", start),
        safety_lag=_get_option(options, "safetyLag", parse_non_negative, 300.0),
        primary=_parse_primary(options, _add_credentials(url, options)),
        max_rows=_get_option(options, "maxRowsPerTrigger", _parse_number, None),
        max_window=_get_option(options, "maxWindowPerTrigger", parse_positive, None),
        fail_on_data_loss=_get_option(options, "failOnDataLoss", _parse_flag, True),
    )


def _normalize_names(raw_options: Mapping[str, str], streaming: bool | None) -> dict[str, str]:
    """Return the options by their proper names, as Spark passes names in lower case.

    Refuse unknown names, and options of streams in a batch or the reverse.
    """
    names = {name.lower(): name for name in (*COMMON_OPTIONS, *BATCH_OPTIONS, *STREAM_OPTIONS)} | {
        "path": "table"
    }
    options: dict[str, str] = {}
    for name, value in raw_options.items():
        proper = names.get(name.lower())
        if proper is None:
            raise SetupError(
                f"unknown option {name!r}; allowed are {', '.join(COMMON_OPTIONS)}; for batches "
                f"{', '.join(BATCH_OPTIONS)}; for streams {', '.join(STREAM_OPTIONS)}"
            )
        if options.get(proper, value) != value:
            raise SetupError(
                'load(…) and the option "table" give different tables: remove one of them'
            )
        options[proper] = value
    other_options = {None: (), True: BATCH_OPTIONS, False: STREAM_OPTIONS}[streaming]
    misplaced = [name for name in other_options if name in options]
    if misplaced:
        method, other = ("readStream", BATCH_OPTIONS) if streaming else ("read", STREAM_OPTIONS)
        allowed = ", ".join(
            (*COMMON_OPTIONS, *(STREAM_OPTIONS if other is BATCH_OPTIONS else BATCH_OPTIONS))
        )
        raise SetupError(
            f"the option {misplaced[0]!r} is not allowed with spark.{method}; allowed are {allowed}"
        )
    return options


def _parse_selection(kind: str, options: Mapping[str, str]) -> Selection:
    """Return the selected rows, by the table, queues, states and times in the options.

    Streams have no options since and until: the windows of a stream decide its times.
    """
    return select_rows(
        LAYOUTS[kind],
        options.get("table"),
        options.get("schema"),
        since=options.get("since"),
        until=options.get("until"),
        queues=_get_option(options, "queues", _parse_list, None),
        states=_get_option(options, "states", _parse_list, None),
    )


def _get_option(
    options: Mapping[str, str], name: str, parse: Callable[[str, str], T], default: Any
) -> Any:
    """Parse an option, or return the default if the option is not set.

    `parse` gets name and text; its errors name the option as the user wrote it.
    """
    return parse(name, options[name]) if name in options else default


def _parse_url(options: Mapping[str, str], name: str) -> URL | None:
    """Parse an option that is a URL, without repeating the URL in errors; None if not set.

    `name` is the option: "url", or "primary" for the primary of a standby.
    """
    if name not in options:
        return None
    try:
        return make_url(options[name])
    except (ArgumentError, ValueError):
        # Trap: raise without the cause, because its text repeats the URL and its password.
        raise SetupError(
            f"the option {name!r} must be a URL such as postgresql://user@host/name"
        ) from None


def _add_credentials(url: URL, options: Mapping[str, str]) -> URL:
    """Return the URL with user and password from the options, which win over the URL's own.

    The option passwordEnv names an environment variable of the driver, so that the password is in
    no program.
    """
    if "password" in options and "passwordEnv" in options:
        raise SetupError("password and passwordEnv are both given: remove one of them")
    password = options.get("password")
    if "passwordEnv" in options:
        password = os.environ.get(options["passwordEnv"])
        if password is None:
            raise SetupError(
                f"passwordEnv names the variable {options['passwordEnv']!r}, which was not set "
                "when the driver's Java started: set it before Spark starts"
            )
    if "user" in options:
        url = url.set(username=options["user"])
    return url if password is None else url.set(password=password)


def _parse_primary(options: Mapping[str, str], url: URL) -> URL | None:
    """Return the primary's URL; without a user the standby's credentials apply.

    `url` is that of the standby, with user and password. None if there is no primary.
    """
    primary = _parse_url(options, "primary")
    if primary is None or primary.username is not None:
        return primary
    primary = primary.set(username=url.username)
    return primary if url.password is None else primary.set(password=url.password)


def _parse_number(name: str, text: str) -> int:
    return validate_integer(name, int(text) if text.strip().isdecimal() else text)


def _parse_partitions(name: str, text: str) -> int | None:
    """Parse numPartitions; None for "auto", which lets the table's size decide."""
    if text.lower() == "auto":
        return None
    value = int(text) if text.strip().isdecimal() else text
    return validate_integer(name, value, maximum=MAX_NUM_PARTITIONS, other=' or "auto"')


def _parse_flag(name: str, text: str) -> bool:
    check_choice(name, text.lower(), ("true", "false"))
    return text.lower() == "true"


def _parse_list(name: str, text: str) -> tuple[str, ...]:
    """Parse names between commas, or a JSON list for names that contain commas.

    Spark passes options as text only.
    """
    if not text.lstrip().startswith("["):
        return tuple(part.strip() for part in text.split(",") if part.strip())
    try:
        values = json.loads(text)
    except ValueError:
        values = None
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        raise SetupError(
            f"{name} must be comma-separated names or a JSON list of strings, got {text!r}"
        )
    return tuple(values)
