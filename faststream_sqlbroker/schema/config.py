"""The names of the broker's tables, and the sizes of the archive's partitions.

All bounds of partitions are midnights of UTC.
"""

import re
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone

from faststream_sqlbroker.core.checks import check_choice
from faststream_sqlbroker.exceptions import SetupError

PARTITION_SIZES = ("day", "week", "month")
"""Allowed values of `archive_partitions`; weeks begin on Monday."""
PARTITIONS_AHEAD = 4
"""Number of partitions that are created after the current one."""


def get_partition_start(time: datetime, size: str) -> datetime:
    """Return the start of the partition that contains `time`.

    `size` is "day", "week" or "month". Partitions begin at midnight UTC, weeks on Monday.
    """
    day = time.astimezone(timezone.utc).replace(hour=0, minute=0, second=0, microsecond=0)
    if size == "week":
        return day - timedelta(days=day.weekday())
    return day.replace(day=1) if size == "month" else day


def get_next_partition_start(start: datetime, size: str) -> datetime:
    """Return the start of the partition after the partition that begins at `start`."""
    # So many days later is always within the next partition, whose start is then computed.
    max_days = {"day": 1, "week": 7, "month": 31}[size]
    return get_partition_start(start + timedelta(days=max_days), size)


def list_required_partitions(now: datetime, size: str) -> list[tuple[datetime, datetime]]:
    """Return start and end of the current partition, and of the next `PARTITIONS_AHEAD`.

    A message without a partition for its time would go to the DEFAULT partition.
    """
    start = get_partition_start(now, size)
    ranges = []
    for _ in range(PARTITIONS_AHEAD + 1):
        end = get_next_partition_start(start, size)
        ranges.append((start, end))
        start = end
    return ranges


MAX_TABLE_NAME_LENGTH = 40
"""Maximum length in characters; PostgreSQL cuts names at 63 bytes, and indexes and constraints add
a suffix."""

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_$]*")


@dataclass(frozen=True, kw_only=True)
class SqlBrokerSchemaConfig:
    """Names of the broker's tables.

    Args:
        message_table_name: Messages that wait or are being handled.
        message_archive_table_name: Finished messages; None keeps none of them.
        schema: The database schema (MySQL, MariaDB: the database); None is the connection's
            default.
        notify_trigger: PostgreSQL: the tables get triggers that notify subscribers of all messages
            that become claimable, as `max_fetch_interval=None` needs; elsewhere without effect.
        sql_functions: PostgreSQL, MySQL and MariaDB: the functions `sqlbroker_publish`,
            `sqlbroker_cancel`, `sqlbroker_load` and others are created with the tables; SQLite has
            no functions, so creating its tables then raises NotSupportedError.
        archive_partitions: PostgreSQL: the archive has partitions of a "day", "week" or "month" of
            `archived_at`. Old partitions are dropped completely. The primary key is (id,
            archived_at). Elsewhere creating a broker or its tables raises NotSupportedError.

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
        """Validate the names."""
        check_name("message_table_name", self.message_table_name)
        if self.message_archive_table_name is not None:
            check_name("message_archive_table_name", self.message_archive_table_name)
        if self.schema is not None:
            check_name("schema", self.schema)
        if self.archive_partitions is not None:
            check_choice("archive_partitions", self.archive_partitions, PARTITION_SIZES)
            if self.message_archive_table_name is None:
                raise SetupError(
                    "archive_partitions needs an archive: set message_archive_table_name, or "
                    "omit archive_partitions"
                )
        used_names = {
            self.message_table_name,
            self.version_table_name,
            self.policy_state_table_name,
        }
        if self.message_archive_table_name in used_names:
            msg = (
                f"message_archive_table_name {self.message_archive_table_name!r} is already the "
                "name of another table of the broker: choose another name, or None for no archive"
            )
            raise SetupError(msg)

    @property
    def policy_state_table_name(self) -> str:
        """Name of the small table of state that outlives a message: slots, keys, schedules."""
        return f"{self.message_table_name}_policy_state"

    @property
    def channel(self) -> str:
        """PostgreSQL's channel of wake-ups; each notification contains a queue."""
        return f"sqlbroker_{self.message_table_name}"[:63]

    @property
    def version_table_name(self) -> str:
        """Table in which Alembic stores the version of the tables."""
        return f"{self.message_table_name}_schema_version"


def check_name(option: str, name: object) -> None:
    """Check that `name`, the value of `option`, is a valid name of a table or schema.

    Raises:
        SetupError: the name is invalid.
    """
    if not isinstance(name, str) or not _NAME.fullmatch(name) or len(name) > MAX_TABLE_NAME_LENGTH:
        msg = (
            f"{option} must be a letter or underscore followed by letters, digits, underscores or "
            f"dollar signs, at most {MAX_TABLE_NAME_LENGTH} characters, got {name!r}"
        )
        raise SetupError(msg)
