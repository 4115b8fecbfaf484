"""Make Alembic's autogenerate write revisions of the broker's tables that run without edits.

`include_tables` sets this up for applications that own their migrations. Alembic has no hook for
a single table, but it calls registered comparators before it renders. The comparator here adds
two options to those that the application passed to `context.configure`: `render_item` and
`process_revision_directives`.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from alembic.autogenerate import comparators
from alembic.operations import ops
from sqlalchemy import CheckConstraint, MetaData, Table

from faststream_sqlbroker.schema.partitions import list_partition_names
from faststream_sqlbroker.schema.tables import (
    IN_CALENDAR,
    build_default_partition,
    build_storage_options,
)
from faststream_sqlbroker.schema.types import (
    MYSQL,
    BrokerJson,
    MysqlVariant,
    UtcTimestamp,
    get_timestamp_type,
)

RenderItem = Callable[[str, Any, Any], Any]
Directives = Callable[[Any, Any, list[Any]], None]


@comparators.dispatch_for("schema")
def add_options(context: Any, _upgrade: Any, _schemas: Any) -> None:
    """Add the options to the run if the metadata contains a broker's tables.

    Alembic calls this before it renders a revision, for every application in the process. Functions
    that the application passed as these options are still called.
    """
    metadata = context.metadata
    metadatas = [metadata] if isinstance(metadata, MetaData) else list(metadata or ())
    tables = [
        table
        for metadata in metadatas
        for table in metadata.tables.values()
        if _is_message_table(table)
    ]
    if not tables:
        return
    options = context.opts
    options["render_item"] = partial(render_item, options.get("render_item"))
    if context.dialect.name == "postgresql":
        all_tables = [table for metadata in metadatas for table in metadata.tables.values()]
        archives = [t for t in all_tables if t.dialect_options["postgresql"]["partition_by"]]
        directives = options.get("process_revision_directives")
        options["process_revision_directives"] = partial(
            write_directives, tables, archives, directives
        )


def render_item(app_render: RenderItem | None, kind: str, item: Any, context: Any) -> Any:
    """Render an item that Alembic would render wrongly; pass the rest to `app_render`.

    An item is a part of a revision, such as a type. The broker's types become the database's types,
    so that a revision does not import this package. None omits the item, False leaves it to
    Alembic.
    """
    if kind == "type" and (rendered := _render_type(item, context)) is not None:
        return rendered
    is_check = kind == "check" and str(item.sqltext) == IN_CALENDAR
    if is_check and context.dialect.name != "postgresql":
        return None  # Alembic ignores `ddl_if`, which limits the check to PostgreSQL
    return False if app_render is None else app_render(kind, item, context)


def _render_type(item: Any, context: Any) -> str | None:
    """Return the code of a revision for a type of the broker, or None for another type."""
    if isinstance(item, UtcTimestamp):
        return _render_repr(get_timestamp_type(context.dialect.name), context)
    if isinstance(item, MysqlVariant):
        names = ", ".join(map(repr, MYSQL))
        other = _render_repr(item.get_mysql_type(), context)
        return f"{_render_repr(item.impl_instance, context)}.with_variant({other}, {names})"
    if isinstance(item, BrokerJson):
        context.imports.add("from sqlalchemy.dialects import postgresql")
        prefix = context.opts["sqlalchemy_module_prefix"] or ""
        jsonb = "postgresql.JSONB(none_as_null=True)"
        return f"{prefix}JSON(none_as_null=True).with_variant({jsonb}, 'postgresql')"
    return None


def _is_message_table(table: Table) -> bool:
    """Return True if `table` is a broker's message table, recognised by a CHECK that only it has.

    A mark in `info` would work too, but Alembic would render it into the revision.
    """
    checks = (
        constraint for constraint in table.constraints if isinstance(constraint, CheckConstraint)
    )
    return any(str(check.sqltext) == IN_CALENDAR for check in checks)


def _render_repr(kind: Any, context: Any) -> str:
    """Return the code that creates the type `kind`, and add the import to the revision.

    A type of a single database is in a module of its own.
    """
    module = type(kind).__module__.split(".")
    if module[:2] == ["sqlalchemy", "dialects"]:
        context.imports.add(f"from sqlalchemy.dialects import {module[2]}")
        return f"{module[2]}.{kind!r}"
    return f"{context.opts['sqlalchemy_module_prefix'] or ''}{kind!r}"


def write_directives(
    tables: list[Table],
    archives: list[Table],
    app_directives: Directives | None,
    context: Any,
    revision: Any,
    scripts: list[Any],
) -> None:
    """Set storage parameters after the creation of `tables`, and ignore partitions of `archives`.

    Alembic calls it with the operations of the new revisions. The metadata has no partitions, as
    they come and go, so Alembic would drop them. The application's own directives are called at the
    end.
    """
    partitions = {
        name for table in archives for name in list_partition_names(context.connection, table)
    }
    for script in scripts:
        for operations in (*script.upgrade_ops_list, *script.downgrade_ops_list):
            operations.ops[:] = [
                op for op in operations.ops if getattr(op, "table_name", None) not in partitions
            ]
        for upgrade in script.upgrade_ops_list:
            upgrade.ops[:] = [
                operation
                for op in upgrade.ops
                for operation in _expand_operation(tables, context, op)
            ]
    if app_directives is not None:
        app_directives(context, revision, scripts)


def _expand_operation(tables: list[Table], context: Any, op: Any) -> list[Any]:
    """Return `op`, and the statements that must follow the creation of a table.

    They set the storage parameters of a message table, or create an archive's DEFAULT partition.
    """
    if not isinstance(op, ops.CreateTableOp):
        return [op]
    partitions = (
        [build_default_partition(op.to_table())] if op.kw.get("postgresql_partition_by") else []
    )
    message_tables = [
        table for table in tables if (table.schema, table.name) == (op.schema, op.table_name)
    ]
    statements = (*partitions, *map(build_storage_options, message_tables))
    return [
        op,
        *(
            ops.ExecuteSQLOp(str(statement.compile(dialect=context.dialect)))
            for statement in statements
        ),
    ]
