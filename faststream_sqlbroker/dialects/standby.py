"""From which due time on messages stand by (`core.policies.standby`), in the SQL of a database."""

from faststream_sqlbroker.core.policies.standby import STANDBY
from faststream_sqlbroker.core.times import from_microseconds


def standby_time(database: str) -> str:
    """A literal of `database`."""
    if database == "sqlite":
        return str(STANDBY)
    moment = f"{from_microseconds(STANDBY):%Y-%m-%d %H:%M:%S}"
    return f"'{moment}+00'" if database == "postgresql" else f"'{moment}'"
