"""Moments as users write them."""

from datetime import date, datetime, timezone

from faststream_sqlbroker.exceptions import SetupError

Moment = datetime | date | str
"""An aware datetime, a date (its midnight in UTC), or either as ISO 8601 text."""


def parse_moment(name: str, value: Moment | None) -> datetime | None:
    """Return `value` as an aware datetime in UTC.

    Raises:
        SetupError: a datetime without a time zone, or text that is not ISO 8601.
    """
    if value is None:
        return None
    given = value
    if isinstance(value, str):
        value = _parse_text(name, value)
    if isinstance(value, datetime):
        if value.tzinfo is None:
            raise SetupError(
                f"{name} {given!r} has no time zone: add one, like 2026-03-01T12:00:00+00:00"
            )
        return value.astimezone(timezone.utc)
    if isinstance(value, date):
        return datetime(value.year, value.month, value.day, tzinfo=timezone.utc)
    raise SetupError(f"{name} must be a datetime, a date or ISO 8601 text, got {given!r}")


def _parse_text(name: str, value: str) -> datetime | date:
    try:
        return (
            date.fromisoformat(value)
            if len(value) == len("2026-03-01")
            else datetime.fromisoformat(value)
        )
    except ValueError as error:
        msg = (
            f"{name} {value!r} is no ISO 8601 time: give one like 2026-03-01 or "
            "2026-03-01T12:00:00+00:00"
        )
        raise SetupError(msg) from error
