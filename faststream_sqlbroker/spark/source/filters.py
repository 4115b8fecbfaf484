"""Spark's filters as SQL: those that every database answers as Spark does, or with more rows."""

from collections.abc import Mapping
from datetime import datetime
from typing import Any

from faststream_sqlbroker.spark.databases import Database
from faststream_sqlbroker.spark.load.columns import Field

RANGES = {"GreaterThan": ">", "GreaterThanOrEqual": ">=", "LessThan": "<", "LessThanOrEqual": "<="}
EQUALITIES = ("EqualTo", "EqualNullSafe")
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
    # One branch for each kind of filter: all rules of what may be pushed are read in one place.
    kind = type(given).__name__
    attribute: tuple[str, ...] = getattr(given, "attribute", ())
    field = fields.get(attribute[0]) if len(attribute) == 1 else None
    if field is None:
        return None
    name = database.quote(field.name)
    if kind in ("IsNull", "IsNotNull"):
        return f"{name} IS {'NOT ' if kind == 'IsNotNull' else ''}NULL"
    if kind in EQUALITIES:
        if given.value is None:
            return f"{name} IS NULL" if kind == "EqualNullSafe" else None
        literal = _literal(given.value, database, field)
        return None if literal is None else f"{name} = {literal}"
    if kind == "In":
        literals = [_literal(value, database, field) for value in given.value if value is not None]
        known = [literal for literal in literals if literal is not None]
        return f"{name} IN ({', '.join(known)})" if known and len(known) == len(literals) else None
    if kind in RANGES and field.type != "string":
        literal = _literal(given.value, database, field)
        return None if literal is None else f"{name} {RANGES[kind]} {literal}"
    return None


def _literal(value: Any, database: Database, field: Field) -> str | None:
    # A literal is written only for types that the database and Spark compare alike; each condition
    # excludes one difference.
    if field.type in ("int", "bigint") and type(value) is int and -MOST <= value < MOST:
        return str(value)
    # PostgreSQL's texts hold no zero byte.
    if field.name in TEXTS and isinstance(value, str) and "\0" not in value:
        return database.text(value)
    if (
        field.type == "timestamp"
        and isinstance(value, datetime)
        and value.tzinfo
        and value.year >= FIRST_YEAR
    ):
        return database.moment(value)
    return None
