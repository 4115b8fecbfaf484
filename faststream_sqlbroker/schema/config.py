"""Where the broker's tables are, and by which lengths of time the archive may be partitioned.

All bounds of partitions are midnights of UTC.
"""

import re
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone

from faststream_sqlbroker.core.checks import one_of
from faststream_sqlbroker.exceptions import SetupError

PARTITION_SIZES = ("day", "week", "month")
"""What `archive_partitions` may be; weeks begin on Monday."""
PARTITIONS_AHEAD = 4
"""Partitions that are kept ready behind the current one."""


def partition_start(moment: datetime, size: str) -> datetime:
    """The start of the partition that `moment` belongs to."""
    day = moment.astimezone(timezone.utc).replace(hour=0, minute=0, second=0, microsecond=0)
    if size == "week":
        return day - timedelta(days=day.weekday())
    return day.replace(day=1) if size == "month" else day


def next_partition_start(start: datetime, size: str) -> datetime:
    """The start of the partition after the one that begins at `start`."""
    longest = {"day": 1, "week": 7, "month": 31}[size]
    return partition_start(start + timedelta(days=longest), size)


def partitions_wanted(now: datetime, size: str) -> list[tuple[datetime, datetime]]:
    """Start and end of the current partition, and of the next `PARTITIONS_AHEAD`."""
    start = partition_start(now, size)
    found = []
    for _ in range(PARTITIONS_AHEAD + 1):
        end = next_partition_start(start, size)
        found.append((start, end))
        start = end
    return found


LONGEST_TABLE_NAME = 40
"""Characters; PostgreSQL cuts names at 63 bytes, and indexes and constraints add a suffix."""

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_$]*")


@dataclass(frozen=True, kw_only=True)
class SqlBrokerSchemaConfig:
    """Names of the broker's tables.

    Args:
        message_table_name: Messages that wait or are being handled.
        message_archive_table_name: Finished messages; None keeps none of them.
        schema: The database schema (MySQL, MariaDB: the database); None is the connection's
            default.
        notify_trigger: PostgreSQL: the tables get triggers that tell subscribers of all that
            becomes claimable, as `max_fetch_interval=None` needs; elsewhere without effect.
        sql_functions: PostgreSQL, MySQL and MariaDB: the functions `sqlbroker_publish`,
            `sqlbroker_cancel`, `sqlbroker_load` and others come with the tables; SQLite has no
            functions, so making its tables then raises NotSupportedError.
        archive_partitions: PostgreSQL: the archive has partitions of a "day", "week" or "month" of
            `archived_at`. Old ones are dropped as a whole. Its primary key is (id, archived_at).
            Elsewhere making a broker or its tables raises NotSupportedError.

    Raises:
        SetupError: A name that is not a letter or underscore followed by letters, digits,
            underscores or dollar signs, at most 40 in all; or the same name twice.
    """

    message_table_name: str = "message"
    message_archive_table_name: str | None = "message_archive"
    schema: str | None = None
    notify_trigger: bool = False
    sql_functions: bool = False
    archive_partitions: str | None = None

    def __post_init__(self) -> None:
        """Check the names."""
        check_name("message_table_name", self.message_table_name)
        if self.message_archive_table_name is not None:
            check_name("message_archive_table_name", self.message_archive_table_name)
        if self.schema is not None:
            check_name("schema", self.schema)
        if self.archive_partitions is not None:
            one_of("archive_partitions", self.archive_partitions, PARTITION_SIZES)
            if self.message_archive_table_name is None:
                raise SetupError(
                    "archive_partitions needs an archive: give message_archive_table_name, or "
                    "leave archive_partitions out"
                )
        taken = {self.message_table_name, self.version_table_name, self.policy_state_table_name}
        if self.message_archive_table_name in taken:
            msg = (
                f"message_archive_table_name {self.message_archive_table_name!r} is already the "
                "name of another table of the broker: choose another, or None for no archive"
            )
            raise SetupError(msg)

    @property
    def policy_state_table_name(self) -> str:
        """The small table of what outlives a message's row: slots, keys, locks, schedules."""
        return f"{self.message_table_name}_policy_state"

    @property
    def channel(self) -> str:
        """PostgreSQL's channel of wake-ups: each notification carries a queue."""
        return f"sqlbroker_{self.message_table_name}"[:63]

    @property
    def version_table_name(self) -> str:
        """The table in which Alembic notes the version of these tables."""
        return f"{self.message_table_name}_schema_version"


def check_name(option: str, name: object) -> None:
    """Whether `name`, given as `option`, can be the name of a table or schema.

    Raises:
        SetupError: it cannot.
    """
    if not isinstance(name, str) or not _NAME.fullmatch(name) or len(name) > LONGEST_TABLE_NAME:
        msg = (
            f"{option} cannot be {name!r}: it is a letter or underscore followed by letters, "
            f"digits, underscores or dollar signs, at most {LONGEST_TABLE_NAME} characters"
        )
        raise SetupError(msg)
