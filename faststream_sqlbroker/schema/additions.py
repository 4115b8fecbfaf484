"""What a migration does that only adds columns and indexes to tables that are there."""

from alembic import op
from sqlalchemy import Inspector, Table, inspect
from sqlalchemy.schema import CreateColumn, CreateIndex

from faststream_sqlbroker.schema.tables import added_by, build_tables


def add(revision: str) -> None:
    """Add the columns and indexes of `revision`; each table is altered, and locked, once."""
    context = op.get_context()
    dialect = context.dialect
    tables = build_tables(context.opts["sqlbroker_config"], revision=revision)
    for table in tables.for_dialect(dialect.name).ours:
        there = set() if context.as_sql else _names(inspect(op.get_bind()), table)
        columns, indexes = added_by(revision, table)
        added = [
            f"ADD COLUMN {CreateColumn(column).compile(dialect=dialect)}"
            for column in columns
            if column.name not in there
        ]
        if added and dialect.name != "sqlite":  # which adds one at a time
            added = [", ".join(added)]
        for clause in added:
            op.execute(f"ALTER TABLE {dialect.identifier_preparer.format_table(table)} {clause}")
        for index in indexes:
            if index.name not in there:
                op.execute(CreateIndex(index))


def _names(inspector: Inspector, table: Table) -> set[str | None]:
    """Columns and indexes that are there: MySQL commits each statement, so an upgrade may have
    ended half-way.
    """
    columns = inspector.get_columns(table.name, schema=table.schema)
    indexes = inspector.get_indexes(table.name, schema=table.schema)
    return {each["name"] for each in [*columns, *indexes]}


def drop(revision: str) -> None:
    """Drop them, with what is in them."""
    context = op.get_context()
    tables = build_tables(context.opts["sqlbroker_config"], revision=revision)
    for table in reversed(tables.for_dialect(context.dialect.name).ours):
        columns, indexes = added_by(revision, table)
        for index in indexes:
            op.drop_index(str(index.name), table.name, schema=table.schema)
        for column in reversed(columns):
            op.drop_column(table.name, column.name, schema=table.schema)
