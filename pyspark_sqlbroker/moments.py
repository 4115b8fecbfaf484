"""Points in time as users write them, and as text for SQL and names of folders."""

from datetime import date, datetime, timezone

from faststream_sqlbroker.exceptions import SetupError

TimeInput = datetime | date | str
"""An aware datetime, a date (its midnight in UTC), or either as ISO 8601 text."""

MIN_TIME = datetime.min.replace(tzinfo=timezone.utc)
"""The first time that Python supports; PostgreSQL has earlier times, and -infinity."""


def format_utc(time: datetime) -> str:
    """Format an aware datetime as text in UTC, such as `2026-03-01 12:00:00.000000`.

    The year has four digits, unlike in `%Y`: databases read the year 1 as 2001.
    """
    naive = time.astimezone(timezone.utc).replace(tzinfo=None)
    return naive.isoformat(sep=" ", timespec="microseconds")


def parse_time(name: str, value: TimeInput | None) -> datetime | None:
    """Convert `value` to an aware datetime in UTC.

    Raises:
        SetupError: a datetime without a time zone, or text that is not ISO 8601, or a time that
            lies in UTC before the year 1 or after 9999.
    """
    if value is None:
        return None
    original = value
    if isinstance(value, str):
        value = _parse_text(name, value)
    if isinstance(value, datetime):
        if value.tzinfo is None:
            raise SetupError(
                f"{name} {original!r} has no time zone: add one, as in 2026-03-01T12:00:00+00:00"
            )
        try:
            return value.astimezone(timezone.utc)
        except OverflowError as error:
            msg = f"{name} must be a time of the years 1 to 9999 in UTC, got {original!r}"
            raise SetupError(msg) from error
    if isinstance(value, date):
        return datetime(value.year, value.month, value.day, tzinfo=timezone.utc)
    raise SetupError(f"{name} must be a datetime, a date or ISO 8601 text, got {original!r}")


def _parse_text(name: str, value: str) -> datetime | date:
    """Parse ISO 8601 text; a text of ten characters is a date.

    `name` is the argument's name, for the error.
    """
    try:
        return (
            date.fromisoformat(value)
            if len(value) == len("2026-03-01")
            else datetime.fromisoformat(value)
        )
    except ValueError as error:
        msg = (
            f"{name} {value!r} is not an ISO 8601 time: use a time such as 2026-03-01 or "
            "2026-03-01T12:00:00+00:00"
        )
        raise SetupError(msg) from error
