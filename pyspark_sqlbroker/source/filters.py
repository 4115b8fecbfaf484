"""Filters of a query as conditions of the database, for Spark 4.1 and newer, which pushes them."""

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

from pyspark_sqlbroker.databases import ArchiveDatabase, get_database
from pyspark_sqlbroker.load.columns import Field
from pyspark_sqlbroker.load.selection import Selection
from pyspark_sqlbroker.source.scan import BatchReader

OPERATORS = {GreaterThan: ">", GreaterThanOrEqual: ">=", LessThan: "<", LessThanOrEqual: "<="}
SAFE_YEARS = range(1000, 9999)
"""Years of times that every database reads with Spark's meaning."""
MAX_VALUES = 1000
"""Maximum length of a list; Spark itself evaluates longer lists."""
OPAQUE_COLUMNS = ("headers", "payload")
"""Columns whose types differ from Spark's: the database is queried only for IS NULL."""


class FilteringReader(BatchReader):
    """A batch reader that pushes filters which the database evaluates exactly like Spark."""

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:  # noqa: N802 - Spark's name
        """Accept filters; return the filters that Spark must evaluate itself.

        Spark calls this before it plans the partitions. An accepted filter becomes a condition of
        the statement, so that the database sends fewer rows.
        """
        selection = self._options.selection
        database = get_database(self._options.address)
        fields = {field.name: field for field in selection.fields}
        unpushed = []
        for filter_ in filters:
            condition = to_condition(database, fields, filter_)
            if condition is None:
                unpushed.append(filter_)
                continue
            selection = replace(
                _limit_times(selection, filter_), conditions=(*selection.conditions, condition)
            )
        self._options = replace(self._options, selection=selection)
        return unpushed


def to_condition(
    database: ArchiveDatabase, fields: dict[str, Field], filter_: Filter
) -> str | None:
    """Convert a filter to SQL; None if there is no equivalent, so that Spark evaluates it.

    The SQL is true, false or NULL for exactly the rows for which the filter is. A filter on a part
    of a column, such as a field of a struct, has a path of several names.
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
    return None if field.name in OPAQUE_COLUMNS else _build_comparison(database, field, filter_)


def _build_comparison(database: ArchiveDatabase, field: Field, filter_: Any) -> str | None:
    """Return the condition of a filter with a value; None if databases may compare differently.

    Spark then evaluates the filter itself. Texts are compared for equality only.
    """
    name = database.quote(field.name)
    if isinstance(filter_, EqualTo):
        return _build_equality(database, field, (filter_.value,))
    if isinstance(filter_, In):
        return _build_equality(database, field, tuple(filter_.value))
    if isinstance(filter_, EqualNullSafe):
        equality = _build_equality(database, field, (filter_.value,))
        return equality and f"{name} IS NOT NULL AND {equality}"
    operator = OPERATORS.get(type(filter_))
    # A collation may order texts differently from Spark.
    literal = (
        _format_literal(database, field, filter_.value)
        if operator and field.type != "string"
        else None
    )
    return literal and f"{name} {operator} {literal}"


def _build_equality(database: ArchiveDatabase, field: Field, values: tuple[Any, ...]) -> str | None:
    """Return the condition that the column equals any of the values.

    None if a value has no exact literal, or if there are none or too many values.
    """
    literals = [_format_literal(database, field, value) for value in values]
    if not literals or None in literals or len(literals) > MAX_VALUES:
        return None
    if field.type == "string":
        return database.build_in_condition(field.name, values)
    return f"{database.quote(field.name)} IN ({', '.join(map(str, literals))})"


def _format_literal(database: ArchiveDatabase, field: Field, value: Any) -> str | None:
    """Format a value of the column's type as SQL; None for any other value, such as NULL.

    None also for values that a database may read or compare differently from Spark.
    """
    if field.type == "string":
        # PostgreSQL has no NUL; readers replace bytes that are not UTF-8 by the other character.
        is_plain = isinstance(value, str) and not {"\0", "\N{REPLACEMENT CHARACTER}"} & set(value)
        return database.format_text(value) if is_plain else None
    if field.type == "timestamp":
        is_point_in_time = isinstance(value, datetime) and value.tzinfo is not None
        return (
            database.format_time(value) if is_point_in_time and value.year in SAFE_YEARS else None
        )
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else None


def _limit_times(selection: Selection, filter_: Filter) -> Selection:
    """Narrow the selection by a filter on the time column.

    The selection's times decide how the rows are cut among tasks. They may be wider than the
    filter, because the filter's own condition is applied, too, and is exact.
    """
    if getattr(filter_, "attribute", ()) != (selection.time_column,):
        return selection
    if isinstance(filter_, GreaterThan | GreaterThanOrEqual):
        since = filter_.value if selection.since is None else max(selection.since, filter_.value)
        return replace(selection, since=since)
    if isinstance(filter_, LessThan | LessThanOrEqual):
        end = filter_.value + timedelta(seconds=1)  # the condition says it exactly
        return replace(selection, until=min(selection.until or end, end))
    return selection
