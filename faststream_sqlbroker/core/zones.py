"""Time zones by their names."""

from zoneinfo import ZoneInfo, ZoneInfoNotFoundError, available_timezones

from faststream_sqlbroker.core.text import short
from faststream_sqlbroker.exceptions import SetupError


def find_zone(name: str, of: str) -> ZoneInfo:
    """The time zone called `name` in the IANA database.

    Args:
        name: Of the zone.
        of: Whose option it is; the error message begins with it.

    Raises:
        SetupError: there is none of that name, or no database.
    """
    try:
        return ZoneInfo(name)
    except (ZoneInfoNotFoundError, ValueError, TypeError, AttributeError, OSError) as error:
        if not available_timezones():
            raise SetupError(
                f"{of} tz cannot be {short(name)}: this machine has no time zone database at all; pip install tzdata, or "
                "install the operating system's package of that name"
            ) from error
        raise SetupError(
            f'{of} tz cannot be {short(name)}: it is a name of the IANA database such as "UTC" or "Europe/Berlin"'
        ) from error
