"""Write every statement of every dialect to tests/sql/<dialect>/<name>.sql, for reading and for review.

python -m tools.golden_sql [--check]
"""

import sys
from pathlib import Path

from sqlalchemy.dialects import registry

from faststream_sqlbroker.dialects import DIALECTS, Dialect, dialect_for
from faststream_sqlbroker.dialects.steps import StepDialect
from faststream_sqlbroker.schema.config import SqlBrokerSchemaConfig
from faststream_sqlbroker.schema.tables import build_tables
from tools.files import report, write_or_compare

FOLDER = Path(__file__).parent.parent / "tests" / "sql"


def statements(dialect: Dialect) -> dict[str, str]:
    """The statements of `dialect` by name, with SQLAlchemy's `:name` binds."""
    found = {name: str(clause) for name, clause in dialect.sql.items()}
    if isinstance(dialect, StepDialect):
        found["insert_two_rows"] = str(dialect.insert_statement(2))
    return found


def files() -> dict[Path, str]:
    """What the folder should hold. MariaDB's statements are MySQL's."""
    tables = build_tables(SqlBrokerSchemaConfig())
    wanted = {}
    for name in DIALECTS:
        if name != "mariadb":
            dialect = dialect_for(registry.load(name)(), tables)
            for statement, sql in statements(dialect).items():
                wanted[FOLDER / name / f"{statement}.sql"] = sql.strip() + "\n"
    return wanted


if __name__ == "__main__":
    only_check = "--check" in sys.argv
    sys.exit(report(write_or_compare(files(), FOLDER, check=only_check), "just sql", check=only_check))
