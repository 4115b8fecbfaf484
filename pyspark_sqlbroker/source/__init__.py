"""The format "sqlbroker": the tables through Python's database drivers, in batches and as a stream.

Spark finds the format by the name of `pyspark_sqlbroker`: `spark.read.format("sqlbroker")`, no jar
needed. The driver and every executor need the package with its extra: `pip install
"sqlbroker[spark]"`, in the environment of PYSPARK_PYTHON; or ship it with `--archives` (venv-pack,
conda-pack). `--py-files` is not enough: the database drivers are compiled. docs/howto/spark.md
lists the options.
"""

import sys
from typing import TYPE_CHECKING

from pyspark.sql.datasource import DataSource
from pyspark.sql.types import StructType

if TYPE_CHECKING:
    from pyspark.sql.datasource import DataSourceReader, DataSourceStreamReader

__all__ = ("DefaultSource",)

FILTER_WORKER_MODULE = "pyspark.sql.worker.data_source_pushdown_filters"
"""Spark's program that pushes filters. Elsewhere a reader that accepts filters is an error, unless
spark.sql.python.filterPushdown.enabled is true.
"""


class DefaultSource(DataSource):
    """The archive (or the live table) as a source of rows, in batches and as a stream.

    Everything else is imported on use: Spark imports this module in each session that names a
    format written in Python, and pickles the class by its module.
    """

    @classmethod
    def name(cls) -> str:
        """Return the name to give to `format(…)`."""
        return "sqlbroker"

    def schema(self) -> StructType:
        """Return `ARCHIVE_SCHEMA`, or `MESSAGE_SCHEMA` with the option kind=messages.

        Raises:
            SetupError: an option is unknown or invalid.
        """
        from pyspark_sqlbroker.load.frames import to_struct  # noqa: PLC0415
        from pyspark_sqlbroker.source.options import parse_options  # noqa: PLC0415

        return to_struct(parse_options(self.options).selection.fields)

    def reader(self, schema: StructType) -> "DataSourceReader":
        """Return a reader of the columns in `schema`.

        Raises:
            SetupError: an option of streams, or a column or type that is not in the table.
            NotSupportedError: another database.
        """
        from pyspark_sqlbroker.source.options import parse_options  # noqa: PLC0415
        from pyspark_sqlbroker.source.scan import BatchReader  # noqa: PLC0415

        options = parse_options(self.options, streaming=False)
        if FILTER_WORKER_MODULE in sys.modules:
            from pyspark_sqlbroker.source.filters import FilteringReader  # noqa: PLC0415

            return FilteringReader(options, schema)
        return BatchReader(options, schema)

    def streamReader(self, schema: StructType) -> "DataSourceStreamReader":  # noqa: N802 - Spark's name
        """Return a reader of the columns in `schema`, window by window.

        Raises:
            SetupError: an option of batches, or a column or type that is not in the table.
            NotSupportedError: the live table, whose rows change and go.
        """
        from pyspark_sqlbroker.source.options import parse_options  # noqa: PLC0415
        from pyspark_sqlbroker.source.stream import make_stream_reader  # noqa: PLC0415

        return make_stream_reader(parse_options(self.options, streaming=True), schema)
