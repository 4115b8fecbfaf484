"""Spark's filters as SQL: those that every database answers as Spark does, or with more rows."""

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from faststream_sqlbroker.spark.databases import Database
from faststream_sqlbroker.spark.load.columns import Field

RANGES = {"GreaterThan": ">", "GreaterThanOrEqual": ">=", "LessThan": "<", "LessThanOrEqual": "<="}
TEXTS = ("queue", "key", "dedup_id", "state", "reason")
"""Columns of text that are compared byte by byte; order is left to Spark, as collations differ in
it."""

FIRST_YEAR = 1000
"""The first year that MySQL's DATETIME supports; earlier moments are left to Spark."""

MOST = 1 << 63
"""One more than the largest BIGINT: larger numbers are left to Spark."""


def to_sql(given: Any, database: Database, fields: Mapping[str, Field]) -> str | None:
    """The filter as a condition that is true for every row that fulfils it, None if Spark must do
    it alone.

    Args:
        given: Of `pyspark.sql.datasource`.
        database: Whose SQL.
        fields: The table's columns by name.
    """
    field = _field(given, fields)
    if field is None:
        return None
    name = database.quote(field.name)
    match type(given).__name__:
        case "IsNull":
            return f"{name} IS NULL"
        case "IsNotNull":
            return f"{name} IS NOT NULL"
        case "EqualNullSafe" if given.value is None:
            return f"{name} IS NULL"
        case "EqualTo" | "EqualNullSafe":
            return _compared(name, "=", _literal(given.value, database, field))
        case "In":
            return _listed(name, given.value, database, field)
        case kind if kind in RANGES and field.type != "string":
            return _compared(name, RANGES[kind], _literal(given.value, database, field))
    return None


def _field(given: Any, fields: Mapping[str, Field]) -> Field | None:
    """The column that the filter is about; None if it is about several, or a part of one."""
    attribute: tuple[str, ...] = getattr(given, "attribute", ())
    return fields.get(attribute[0]) if len(attribute) == 1 else None


def _compared(name: str, operator: str, literal: str | None) -> str | None:
    return None if literal is None else f"{name} {operator} {literal}"


def _listed(name: str, values: Sequence[Any], database: Database, field: Field) -> str | None:
    # NULL equals nothing, so it is left out.
    literals = [_literal(value, database, field) for value in values if value is not None]
    known = [literal for literal in literals if literal is not None]
    return f"{name} IN ({', '.join(known)})" if known and len(known) == len(literals) else None


def _literal(value: Any, database: Database, field: Field) -> str | None:
    """The value as SQL; None if the database and Spark could compare it differently."""
    match value:
        case int() if field.type in ("int", "bigint"):
            # True is an int to Python, and a BOOLEAN to Spark.
            return str(value) if type(value) is int and -MOST <= value < MOST else None
        case str() if field.name in TEXTS:
            # PostgreSQL's texts hold no zero byte.
            return None if "\0" in value else database.text(value)
        case datetime() if field.type == "timestamp":
            exact = value.tzinfo is not None and value.year >= FIRST_YEAR
            return database.moment(value) if exact else None
    return None
