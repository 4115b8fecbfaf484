"""Streams of Spark 4.2 and newer, which passes a micro-batch's start and its limit of rows."""

from datetime import datetime
from typing import TYPE_CHECKING, Any

from pyspark.sql.types import StructType

from pyspark_sqlbroker.databases import get_database
from pyspark_sqlbroker.source.options import SourceOptions
from pyspark_sqlbroker.source.stream import StreamReader, WindowLimits, from_offset, to_offset

if TYPE_CHECKING:

    class SupportsTriggerAvailableNow:
        """Spark's class, which older versions lack."""

else:
    from pyspark.sql.streaming.datasource import SupportsTriggerAvailableNow

UNLIMITED_ROWS = (1 << 63) - 1
"""Number of rows that stands for "all", if only the window's length is limited: Spark itself treats
"all" as having no limit.
"""


class LimitedStreamReader(StreamReader, SupportsTriggerAvailableNow):
    """A stream reader that keeps the limits under every trigger.

    The trigger availableNow takes as many windows as it needs.
    """

    def __init__(self, options: SourceOptions, schema: StructType) -> None:
        super().__init__(options, schema)
        self._target: datetime | None = None

    def getDefaultReadLimit(self) -> Any:  # noqa: N802 - Spark's name
        """Return maxRowsPerTrigger as Spark's limit, which Spark passes to `latestOffset`.

        If only the length of a window is limited, the limit is a number of rows that no window has.
        """
        from pyspark.sql.streaming import datasource  # type: ignore[attr-defined]  # noqa: PLC0415

        options = self._options
        if options.max_rows is None and options.max_window is None:
            return datasource.ReadAllAvailable()
        return datasource.ReadMaxRows(options.max_rows or UNLIMITED_ROWS)

    def latestOffset(self, start: dict[str, str], limit: Any) -> dict[str, str]:  # type: ignore[override]  # noqa: N802
        """Return the end of the window that begins at `start`; `start` if there are no new rows.

        `limit` is that of `getDefaultReadLimit`. A limit without a number of rows means all new
        rows, whatever the length of the window.
        """
        rows = getattr(limit, "max_rows", None)
        limits = (
            WindowLimits()
            if rows is None
            else WindowLimits(None if rows == UNLIMITED_ROWS else rows, self._options.max_window)
        )
        return to_offset(self._find_next_offset(from_offset(start), limits, self._target))

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802 - Spark's name
        """Take the current horizon as the end of the query.

        Spark calls this once for the trigger availableNow, whose query ends with these rows.
        """
        database = get_database(self._options.address)
        with database.connect() as connection:
            self._target = self._find_horizon(database, connection)

    def reportLatestOffset(self) -> dict[str, str] | None:  # noqa: N802 - Spark's name
        """Return the last horizon: how far the stream could be.

        Spark shows it with the progress of a query, as a measure of the stream's lag.
        """
        return None if self._last_horizon is None else to_offset(self._last_horizon)
