"""MySQL and MariaDB for readers."""

from collections.abc import Sequence
from datetime import datetime

from sqlalchemy import Connection, Insert, Table, text
from sqlalchemy.dialects import mysql

from pyspark_sqlbroker.databases.base import MAX_IDLE_SECONDS, ArchiveDatabase, TableSize
from pyspark_sqlbroker.load.columns import Field
from pyspark_sqlbroker.moments import format_utc


class MySQL(ArchiveDatabase):
    """MySQL and MariaDB; times are DATETIME(6) in UTC."""

    kind = "mysql"
    jdbc_driver = "org.mariadb.jdbc.Driver"
    native_timestamps = False

    def configure_session(self, connection: Connection) -> None:
        """Let the connection stay idle while Spark works."""
        connection.exec_driver_sql(f"SET SESSION wait_timeout = {MAX_IDLE_SECONDS}")

    def begin(self, connection: Connection) -> None:
        """Begin without the gap locks of REPEATABLE READ, in which parallel writers deadlock."""
        connection.exec_driver_sql("SET TRANSACTION ISOLATION LEVEL READ COMMITTED")
        connection.exec_driver_sql("START TRANSACTION")

    def quote(self, name: str) -> str:
        """Quote by backticks."""
        return "`" + name.replace("`", "``") + "`"

    def format_text(self, value: str) -> str:
        """Encode by bytes: whether a backslash escapes depends on the server's sql_mode."""
        return f"CONVERT(X'{value.encode().hex()}' USING utf8mb4) COLLATE utf8mb4_bin"

    def build_in_condition(self, name: str, values: Sequence[str]) -> str:
        """Compare by an index, then byte by byte: collations treat "a" and "a " as equal."""
        exact = ", ".join(f"X'{value.encode().hex()}'" for value in values)
        return (
            f"{super().build_in_condition(name, values)} AND CAST({self.quote(name)} AS "
            f"BINARY) IN ({exact})"
        )

    def format_time(self, value: datetime) -> str:
        """Format in UTC, like the columns."""
        return f"'{format_utc(value)}'"

    def build_microseconds(self, expression: str) -> str:
        """Convert without any time zone."""
        return f"TIMESTAMPDIFF(MICROSECOND, '1970-01-01', {expression})"

    def build_jdbc_column(self, field: Field) -> str:
        """Select MySQL's JSON as text; MariaDB's JSON is text."""
        name = self.quote(field.name)
        return (
            f"CAST({name} AS CHAR) AS {name}"
            if field.name == "headers"
            else super().build_jdbc_column(field)
        )

    def build_value(self, field: Field) -> str:
        """Select MySQL's JSON as text."""
        value = super().build_value(field)
        return f"CAST({value} AS CHAR)" if field.name == "headers" else value

    def build_clock(self) -> str:
        """Return the clock in UTC."""
        return self.build_microseconds("UTC_TIMESTAMP(6)")

    def build_insert_if_absent(self, table: Table) -> Insert:
        """Build an upsert that changes nothing: IGNORE would hide other errors too."""
        return mysql.insert(table).on_duplicate_key_update(scope=table.c.scope)

    def build_exact_sum(self, expression: str) -> str:
        """Sum whole numbers as DECIMAL."""
        return f"CAST(COALESCE(SUM({expression}), 0) AS CHAR)"

    def build_length(self, column: str) -> str:
        """Return the length in bytes."""
        return f"LENGTH({column})"

    def build_digest_sum(self, expression: str, *, text: bool) -> str:
        """Hash texts as utf8mb4."""
        bytes_ = f"CONVERT({expression} USING utf8mb4)" if text else expression
        return self.build_exact_sum(f"CAST(CONV(SUBSTR(MD5({bytes_}), 1, 15), 16, 10) AS UNSIGNED)")

    def build_joined_text(self, expressions: Sequence[str]) -> str:
        """Join by casts to text."""
        texts = (
            f"COALESCE(CONCAT('=', CONVERT({expression} USING utf8mb4)), '~')"
            for expression in expressions
        )
        return f"CONCAT_WS('|', {', '.join(texts)})"

    def has_table(self, connection: Connection, name: str, schema: str | None) -> bool:
        """Query the server's list.

        Without binds SQLAlchemy would search another database if a name contains a %.
        """
        return self._get_statistics(connection, name, schema) is not None

    def estimate_size(self, connection: Connection, name: str, schema: str | None) -> TableSize:
        """Return InnoDB's estimates."""
        return self._get_statistics(connection, name, schema) or TableSize(0, 0)

    def _get_statistics(
        self, connection: Connection, name: str, schema: str | None
    ) -> TableSize | None:
        """Return a table's estimated size; zeros for a view, None if there is no such table.

        The numbers are InnoDB's estimates, which cost no read of the table.
        """
        row = connection.execute(
            text(
                "SELECT table_rows, data_length FROM information_schema.tables "
                "WHERE table_schema = coalesce(:schema, database()) AND table_name = :name"
            ),
            {"name": name, "schema": schema},
        ).first()
        return None if row is None else TableSize(int(row[0] or 0), int(row[1] or 0))
