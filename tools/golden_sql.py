"""Write every statement of every dialect to tests/sql/<dialect>/<name>.sql, for reading and for
review.

MariaDB's folder holds what differs from MySQL's.

python -m tools.golden_sql [--check]
"""

import sys
from pathlib import Path

from sqlalchemy import make_url

from faststream_sqlbroker.database.dialects import DIALECTS, Dialect, create_dialect
from faststream_sqlbroker.database.multi_statement import MultiStatementDialect
from faststream_sqlbroker.database.statements import read_sources
from faststream_sqlbroker.schema.config import SqlBrokerSchemaConfig
from faststream_sqlbroker.schema.tables import build_tables
from tools.files import report, write_or_compare

FOLDER = Path(__file__).parent.parent / "tests" / "sql"
DRIVERS = {"mysql": "+pymysql", "mariadb": "+pymysql", "postgresql": "+psycopg"}
"""Any that is installed; their statements are the same."""


def statements(dialect: Dialect) -> dict[str, str]:
    """The statements of `dialect` by name, with SQLAlchemy's `:name` binds."""
    found = {name: str(dialect.sql[name]) for name in read_sources(dialect.name)}
    if isinstance(dialect, MultiStatementDialect):
        found["insert_two_rows"] = str(dialect.get_insert_statement(2))
    return found


def files() -> dict[Path, str]:
    """What the folder should hold."""
    tables = build_tables(SqlBrokerSchemaConfig())
    kinds = {name: make_url(f"{name}{DRIVERS.get(name, '')}://").get_dialect() for name in DIALECTS}
    found = {name: statements(create_dialect(kind(), tables)) for name, kind in kinds.items()}
    for statement, sql in found["mysql"].items():
        if found["mariadb"][statement] == sql:
            del found["mariadb"][statement]
    return {
        FOLDER / name / f"{statement}.sql": sql.strip() + "\n"
        for name, texts in found.items()
        for statement, sql in texts.items()
    }


if __name__ == "__main__":
    only_check = "--check" in sys.argv
    sys.exit(
        report(write_or_compare(files(), FOLDER, check=only_check), "just sql", check=only_check)
    )
