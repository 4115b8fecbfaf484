"""MySQL and MariaDB for readers."""

from collections.abc import Sequence
from datetime import datetime

from sqlalchemy import Connection, Insert, Table, text
from sqlalchemy.dialects import mysql

from pyspark_sqlbroker.databases.base import LONGEST_WAIT, ArchiveDatabase, Size
from pyspark_sqlbroker.load.columns import Field
from pyspark_sqlbroker.moments import utc_text


class MySQL(ArchiveDatabase):
    """MySQL and MariaDB; times are DATETIME(6) in UTC."""

    kind = "mysql"
    jdbc_driver = "org.mariadb.jdbc.Driver"
    native_timestamps = False

    def set_up(self, connection: Connection) -> None:
        """Let the connection stay idle while Spark works."""
        connection.exec_driver_sql(f"SET SESSION wait_timeout = {LONGEST_WAIT}")

    def begin(self, connection: Connection) -> None:
        """Without the gaps that REPEATABLE READ locks, in which parallel writers deadlock."""
        connection.exec_driver_sql("SET TRANSACTION ISOLATION LEVEL READ COMMITTED")
        connection.exec_driver_sql("START TRANSACTION")

    def quote(self, name: str) -> str:
        """Backticks."""
        return "`" + name.replace("`", "``") + "`"

    def text(self, value: str) -> str:
        """By its bytes: whether a backslash escapes depends on the server's sql_mode."""
        return f"CONVERT(X'{value.encode().hex()}' USING utf8mb4) COLLATE utf8mb4_bin"

    def among(self, name: str, values: Sequence[str]) -> str:
        """By an index, then byte by byte: the collation takes "a" and "a " for one."""
        exact = ", ".join(f"X'{value.encode().hex()}'" for value in values)
        return f"{super().among(name, values)} AND CAST({self.quote(name)} AS BINARY) IN ({exact})"

    def moment(self, value: datetime) -> str:
        """In UTC, as the columns are."""
        return f"'{utc_text(value)}'"

    def microseconds(self, expression: str) -> str:
        """No time zone takes part."""
        return f"TIMESTAMPDIFF(MICROSECOND, '1970-01-01', {expression})"

    def column(self, field: Field) -> str:
        """MySQL's JSON as text; MariaDB's is text."""
        name = self.quote(field.name)
        return (
            f"CAST({name} AS CHAR) AS {name}" if field.name == "headers" else super().column(field)
        )

    def value(self, field: Field) -> str:
        """MySQL's JSON as text."""
        value = super().value(field)
        return f"CAST({value} AS CHAR)" if field.name == "headers" else value

    def clock(self) -> str:
        """In UTC."""
        return self.microseconds("UTC_TIMESTAMP(6)")

    def insert_new(self, table: Table) -> Insert:
        """An upsert that changes nothing: IGNORE would hide other errors too."""
        return mysql.insert(table).on_duplicate_key_update(scope=table.c.scope)

    def exact_sum(self, expression: str) -> str:
        """Whole numbers are summed as DECIMAL."""
        return f"CAST(COALESCE(SUM({expression}), 0) AS CHAR)"

    def length(self, column: str) -> str:
        """In bytes."""
        return f"LENGTH({column})"

    def digest_sum(self, expression: str, *, text: bool) -> str:
        """Texts are utf8mb4."""
        bytes_ = f"CONVERT({expression} USING utf8mb4)" if text else expression
        return self.exact_sum(f"CAST(CONV(SUBSTR(MD5({bytes_}), 1, 15), 16, 10) AS UNSIGNED)")

    def joined(self, expressions: Sequence[str]) -> str:
        """By casts to text."""
        ones = (f"COALESCE(CONCAT('=', CONVERT({one} USING utf8mb4)), '~')" for one in expressions)
        return f"CONCAT_WS('|', {', '.join(ones)})"

    def has_table(self, connection: Connection, name: str, schema: str | None) -> bool:
        """By the server's list: without binds SQLAlchemy looks for another database where a name
        has a %.
        """
        return self._listed(connection, name, schema) is not None

    def size(self, connection: Connection, name: str, schema: str | None) -> Size:
        """InnoDB's estimates."""
        return self._listed(connection, name, schema) or Size(0, 0)

    def _listed(self, connection: Connection, name: str, schema: str | None) -> Size | None:
        """None if there is no such table; a view has no figures."""
        found = connection.execute(
            text(
                "SELECT table_rows, data_length FROM information_schema.tables "
                "WHERE table_schema = coalesce(:schema, database()) AND table_name = :name"
            ),
            {"name": name, "schema": schema},
        ).first()
        return None if found is None else Size(int(found[0] or 0), int(found[1] or 0))
