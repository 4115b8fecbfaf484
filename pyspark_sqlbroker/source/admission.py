"""Streams of Spark 4.2 and newer, which passes a micro-batch's start and its limit of rows."""

from datetime import datetime
from typing import TYPE_CHECKING, Any

from pyspark.sql.types import StructType

from pyspark_sqlbroker.databases import database_of
from pyspark_sqlbroker.source.options import Options
from pyspark_sqlbroker.source.stream import Limits, StreamReader, from_offset, to_offset

if TYPE_CHECKING:

    class SupportsTriggerAvailableNow:
        """Spark's, which older versions lack."""

else:
    from pyspark.sql.streaming.datasource import SupportsTriggerAvailableNow

ANY_ROWS = (1 << 63) - 1
"""Rows, where only the window's length is limited: Spark treats "all" as having no limit."""


class AdmittingReader(StreamReader, SupportsTriggerAvailableNow):
    """Keeps the limits under every trigger; availableNow takes as many windows as it needs."""

    def __init__(self, options: Options, schema: StructType) -> None:
        super().__init__(options, schema)
        self._target: datetime | None = None

    def getDefaultReadLimit(self) -> Any:  # noqa: N802 - Spark's name
        """MaxRowsPerTrigger as Spark's limit."""
        from pyspark.sql.streaming import datasource  # type: ignore[attr-defined]  # noqa: PLC0415

        options = self._options
        if options.max_rows is None and options.max_window is None:
            return datasource.ReadAllAvailable()
        return datasource.ReadMaxRows(options.max_rows or ANY_ROWS)

    def latestOffset(self, start: dict[str, str], limit: Any) -> dict[str, str]:  # type: ignore[override]  # noqa: N802
        """The end of the window that begins at `start`; `start` if nothing is new."""
        rows = getattr(limit, "max_rows", None)
        limits = (
            Limits()
            if rows is None
            else Limits(None if rows == ANY_ROWS else rows, self._options.max_window)
        )
        return to_offset(self._next(from_offset(start), limits, self._target))

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802 - Spark's name
        """Take the horizon as it is now for the end of the query."""
        database = database_of(self._options.address)
        with database.connect() as connection:
            self._target = self._horizon(database, connection)

    def reportLatestOffset(self) -> dict[str, str] | None:  # noqa: N802 - Spark's name
        """How far the stream could be: the last horizon that was seen."""
        return None if self._seen is None else to_offset(self._seen)
