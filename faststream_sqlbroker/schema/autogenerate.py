"""Make Alembic's autogenerate write revisions of the broker's tables that run without edits.

`include_tables` sets this up for applications that own their migrations. Alembic has no hook for a
single table, but it calls registered comparators before it renders. Ours adds two options to those
that the application gave `context.configure`: `render_item` and `process_revision_directives`.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from alembic.autogenerate import comparators
from alembic.operations import ops
from sqlalchemy import CheckConstraint, MetaData, Table

from faststream_sqlbroker.schema.partitions import partition_names
from faststream_sqlbroker.schema.tables import IN_CALENDAR, default_partition_of, storage_of
from faststream_sqlbroker.schema.types import (
    MYSQL,
    BrokerJson,
    OtherOnMysql,
    UtcTimestamp,
    timestamp_type,
)

RenderItem = Callable[[str, Any, Any], Any]
Directives = Callable[[Any, Any, list[Any]], None]


@comparators.dispatch_for("schema")
def adapt(context: Any, _upgrade: Any, _schemas: Any) -> None:
    """If the metadata holds a broker's tables, add our options to the run."""
    found = context.metadata
    every = [found] if isinstance(found, MetaData) else list(found or ())
    tables = [table for one in every for table in one.tables.values() if _keeps_messages(table)]
    if not tables:
        return
    options = context.opts
    options["render_item"] = partial(render_item, options.get("render_item"))
    if context.dialect.name == "postgresql":
        found = [table for one in every for table in one.tables.values()]
        archives = [t for t in found if t.dialect_options["postgresql"]["partition_by"]]
        given = options.get("process_revision_directives")
        options["process_revision_directives"] = partial(write_whole, tables, archives, given)


def render_item(given: RenderItem | None, kind: str, item: Any, context: Any) -> Any:
    """Render what Alembic would render wrongly; leave the rest to the application's own, `given`.

    Our types become the database's types, so that a revision does not import this package.
    """
    if kind == "type" and (rendered := _render_type(item, context)) is not None:
        return rendered
    is_check = kind == "check" and str(item.sqltext) == IN_CALENDAR
    if is_check and context.dialect.name != "postgresql":
        return None  # Alembic ignores `ddl_if`, by which the check is PostgreSQL's only
    return False if given is None else given(kind, item, context)


def _render_type(item: Any, context: Any) -> str | None:
    if isinstance(item, UtcTimestamp):
        return _repr(timestamp_type(context.dialect.name), context)
    if isinstance(item, OtherOnMysql):
        names = ", ".join(map(repr, MYSQL))
        other = _repr(item.on_mysql(), context)
        return f"{_repr(item.impl_instance, context)}.with_variant({other}, {names})"
    if isinstance(item, BrokerJson):
        context.imports.add("from sqlalchemy.dialects import postgresql")
        prefix = context.opts["sqlalchemy_module_prefix"] or ""
        jsonb = "postgresql.JSONB(none_as_null=True)"
        return f"{prefix}JSON(none_as_null=True).with_variant({jsonb}, 'postgresql')"
    return None


def _keeps_messages(table: Table) -> bool:
    """Whether `table` is a broker's message table.

    Its CHECK tells. A mark in `info` would do, but Alembic would render it into the revision.
    """
    checks = (each for each in table.constraints if isinstance(each, CheckConstraint))
    return any(str(check.sqltext) == IN_CALENDAR for check in checks)


def _repr(kind: Any, context: Any) -> str:
    module = type(kind).__module__.split(".")
    if module[:2] == ["sqlalchemy", "dialects"]:
        context.imports.add(f"from sqlalchemy.dialects import {module[2]}")
        return f"{module[2]}.{kind!r}"
    return f"{context.opts['sqlalchemy_module_prefix'] or ''}{kind!r}"


def write_whole(
    tables: list[Table],
    archives: list[Table],
    given: Directives | None,
    context: Any,
    revision: Any,
    scripts: list[Any],
) -> None:
    """Set the storage parameters of `tables` after their creation, and leave partitions of
    `archives` alone: the metadata has none of them, as they come and go. Then call the
    application's own `given`.
    """
    known = {name for table in archives for name in partition_names(context.connection, table)}
    for script in scripts:
        for one in (*script.upgrade_ops_list, *script.downgrade_ops_list):
            one.ops[:] = [op for op in one.ops if getattr(op, "table_name", None) not in known]
        for upgrade in script.upgrade_ops_list:
            upgrade.ops[:] = [new for op in upgrade.ops for new in _whole(tables, context, op)]
    if given is not None:
        given(context, revision, scripts)


def _whole(tables: list[Table], context: Any, op: Any) -> list[Any]:
    """`op`, and what belongs behind the creation of a table."""
    if not isinstance(op, ops.CreateTableOp):
        return [op]
    made = [default_partition_of(op.to_table())] if op.kw.get("postgresql_partition_by") else []
    ours = [each for each in tables if (each.schema, each.name) == (op.schema, op.table_name)]
    behind = (*made, *map(storage_of, ours))
    return [op, *(ops.ExecuteSQLOp(str(each.compile(dialect=context.dialect))) for each in behind)]
