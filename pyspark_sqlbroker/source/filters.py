"""Filters of a query as conditions of the database: Spark 4.1 and newer, where it pushes them."""

from collections.abc import Iterable
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

from pyspark.sql.datasource import (
    EqualNullSafe,
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    IsNotNull,
    IsNull,
    LessThan,
    LessThanOrEqual,
    Not,
)

from pyspark_sqlbroker.databases import ArchiveDatabase, database_of
from pyspark_sqlbroker.load.columns import Field
from pyspark_sqlbroker.load.selection import Selection
from pyspark_sqlbroker.source.scan import BatchReader

SIGNS = {GreaterThan: ">", GreaterThanOrEqual: ">=", LessThan: "<", LessThanOrEqual: "<="}
YEARS = range(1000, 9999)
"""Of times that every database reads as Spark means them."""
MOST_VALUES = 1000
"""Of a list: a longer one is Spark's to look through."""
UNSEARCHED = ("headers", "payload")
"""Columns of other types than Spark sees: only whether they are NULL is asked of the database."""


class FilteringReader(BatchReader):
    """Leaves to the database what it decides as Spark would; the rest is Spark's."""

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:  # noqa: N802 - Spark's name
        """Take filters; those that are returned Spark evaluates itself."""
        selection = self._options.selection
        database = database_of(self._options.address)
        fields = {field.name: field for field in selection.fields}
        unpushed = []
        for filter_ in filters:
            condition = to_condition(database, fields, filter_)
            if condition is None:
                unpushed.append(filter_)
                continue
            selection = replace(
                _narrowed(selection, filter_), conditions=(*selection.conditions, condition)
            )
        self._options = replace(self._options, selection=selection)
        return unpushed


def to_condition(
    database: ArchiveDatabase, fields: dict[str, Field], filter_: Filter
) -> str | None:
    """The filter as SQL that is true, false or NULL for just the rows for which Spark's is; None if
    there is none.
    """
    if isinstance(filter_, Not):
        inner = to_condition(database, fields, filter_.child)
        return None if inner is None else f"NOT ({inner})"
    path: tuple[str, ...] = getattr(filter_, "attribute", ())
    field = fields.get(path[0]) if len(path) == 1 else None
    if field is None:
        return None
    name = database.quote(field.name)
    if isinstance(filter_, IsNull | IsNotNull):
        return f"{name} IS {'NOT ' if isinstance(filter_, IsNotNull) else ''}NULL"
    return None if field.name in UNSEARCHED else _compared(database, field, filter_)


def _compared(database: ArchiveDatabase, field: Field, filter_: Any) -> str | None:
    """The condition of a filter that has a value."""
    name = database.quote(field.name)
    if isinstance(filter_, EqualTo):
        return _equal(database, field, (filter_.value,))
    if isinstance(filter_, In):
        return _equal(database, field, tuple(filter_.value))
    if isinstance(filter_, EqualNullSafe):
        equal = _equal(database, field, (filter_.value,))
        return equal and f"{name} IS NOT NULL AND {equal}"
    sign = SIGNS.get(type(filter_))
    # Texts are in another order than Spark's where a collation says so.
    literal = _literal(database, field, filter_.value) if sign and field.type != "string" else None
    return literal and f"{name} {sign} {literal}"


def _equal(database: ArchiveDatabase, field: Field, values: tuple[Any, ...]) -> str | None:
    """The condition that the column holds one of the values."""
    literals = [_literal(database, field, value) for value in values]
    if not literals or None in literals or len(literals) > MOST_VALUES:
        return None
    if field.type == "string":
        return database.among(field.name, values)
    return f"{database.quote(field.name)} IN ({', '.join(map(str, literals))})"


def _literal(database: ArchiveDatabase, field: Field, value: Any) -> str | None:
    """A value of the column's type as SQL; None for any other, such as NULL."""
    if field.type == "string":
        # PostgreSQL has no NUL; readers put the other sign in the place of what is no UTF-8.
        is_plain = isinstance(value, str) and not {"\0", "\N{REPLACEMENT CHARACTER}"} & set(value)
        return database.text(value) if is_plain else None
    if field.type == "timestamp":
        is_moment = isinstance(value, datetime) and value.tzinfo is not None
        return database.moment(value) if is_moment and value.year in YEARS else None
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else None


def _narrowed(selection: Selection, filter_: Filter) -> Selection:
    """With the filter's limit of the time, by which the rows are cut among tasks."""
    if getattr(filter_, "attribute", ()) != (selection.time_column,):
        return selection
    if isinstance(filter_, GreaterThan | GreaterThanOrEqual):
        since = filter_.value if selection.since is None else max(selection.since, filter_.value)
        return replace(selection, since=since)
    if isinstance(filter_, LessThan | LessThanOrEqual):
        end = filter_.value + timedelta(seconds=1)  # the condition says it exactly
        return replace(selection, until=min(selection.until or end, end))
    return selection
