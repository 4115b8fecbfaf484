"""Payloads as values: JSON and text by their content type, everything else NULL."""

from typing import Any

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql.types import DataType, LongType, StringType, StructField, StructType, VariantType

from faststream_sqlbroker.core.text import short
from faststream_sqlbroker.exceptions import SetupError

VARIANT = "variant"

NOT_UTF8 = "not_utf8"
NOT_JSON = "not_json"
MISMATCH = "mismatch"
CONTENT_TYPE = "content_type"

_BODY = "v"
_SEAL = "s"
_BROKEN = "c"
_JSON_OPTIONS = {
    "columnNameOfCorruptRecord": _BROKEN,
    "allowSingleQuotes": "false",
    # Times without an offset would be those of the session's zone.
    "timeZone": "UTC",
}


def decode_payload(
    frame: DataFrame, schema: Any = VARIANT, *, column: str = "body", error: str | None = None
) -> DataFrame:
    """Add the decoded payload as a column; a payload that cannot be read is NULL, never an error.

    The header content-type decides, in any case of letters and with any parameters:
    "application/json" and "…+json" are JSON, "text/…" is a text, any other content type is not
    decoded. A message without the header is read as FastStream reads it: as JSON, if it is JSON.
    All of it must be UTF-8. An object that names a field twice is no JSON for "variant"; a schema
    reads it, and takes the last.

    Args:
        frame: With the columns `payload` and `headers` of `ARCHIVE_SCHEMA` or `MESSAGE_SCHEMA`.
        schema: "variant", for bodies of any shape: `body:user.id::int` in SQL, `variant_get` in
            Python. Or what bodies are, which is twice as fast: a `DataType`, its DDL ("user INT,
            amount DOUBLE"), or a Pydantic model class (see `struct_of`). A body in which anything
            has another type is NULL as a whole; fields that are missing in it are NULL, those that
            the schema does not name are left out.
        column: The new column's name.
        error: Name of a second column (STRING) that says why the first is NULL; None adds none. It
            is "content_type" (neither JSON nor text), "not_utf8", "not_json", or "mismatch"
            (something other than the schema says); NULL where the body was decoded.

    Returns:
        The frame with the column, of type VARIANT or the schema's. Times in JSON without an offset
        are UTC.

    Raises:
        SetupError: `schema` is none of these, a model's annotation has no counterpart in Spark (it
            names the field), or the frame lacks `payload` or `headers`.
    """
    missing = [name for name in ("payload", "headers") if name not in frame.columns]
    if missing:
        raise SetupError(
            f"decode_payload needs the columns payload and headers; this frame lacks {missing}"
        )
    wanted = _data_type(schema)
    kind = _kind()
    text = F.try_validate_utf8(F.col("payload").cast("string"))
    parsed = _variant(text) if isinstance(wanted, VariantType) else _typed(text, wanted)
    plain = text.cast(VARIANT) if isinstance(wanted, VariantType) else _plain(text, wanted)
    # One struct is computed once for each row; its two fields become the new columns.
    result = (
        F.when(kind == CONTENT_TYPE, _result(F.lit(None).cast(wanted), F.lit(CONTENT_TYPE)))
        .when(text.isNull(), _result(F.lit(None).cast(wanted), F.lit(NOT_UTF8)))
        .when(kind == "text", _result(plain, F.lit(MISMATCH)))
        .otherwise(parsed)
    )
    inner = f"{column} {error or ''} decoded"
    decoded = frame.withColumn(inner, result).withColumn(column, F.col(f"`{inner}`.body"))
    if error is not None:
        decoded = decoded.withColumn(error, F.col(f"`{inner}`.error"))
    return decoded.drop(inner)


def header(path: str) -> Column:
    """The text of a header by its JSON path below `$`, such as "['dead-letter'].queue"."""
    return F.get_json_object(F.col("headers"), f"${path}")


def _data_type(schema: Any) -> DataType:
    if isinstance(schema, DataType):
        return schema
    if isinstance(schema, type) and hasattr(schema, "model_fields"):
        from pyspark_sqlbroker.load.models import struct_of  # noqa: PLC0415 - only who has models has Pydantic

        return struct_of(schema)
    if not isinstance(schema, str):
        raise SetupError(
            f'schema cannot be {short(schema)}: give "variant", a DataType, its DDL like "user '
            'INT, amount DOUBLE", or a Pydantic model class'
        )
    try:
        return VariantType() if schema.strip().lower() == VARIANT else DataType.fromDDL(schema)
    except Exception as error:
        msg = (
            f"schema {short(schema)} is no DDL that Spark can read: write it like "
            '"user INT, amount DOUBLE"'
        )
        raise SetupError(msg) from error


def _kind() -> Column:
    """What the content type says: "json", "text" or CONTENT_TYPE."""
    # Names of headers keep their case in the table; most are spelled as FastStream does.
    fields = F.map_entries(F.from_json(F.col("headers"), "map<string, string>"))
    named = F.filter(fields, lambda field: F.lower(field["key"]) == "content-type")
    given = F.coalesce(header("['content-type']"), F.get(named, 0)["value"])
    media = F.lower(F.trim(F.split(given, ";").getItem(0)))
    json = media.isNull() | (media == "") | (media == "application/json") | media.endswith("+json")
    return F.when(json, "json").when(media.startswith("text/"), "text").otherwise(CONTENT_TYPE)


def _result(body: Column, error: Column) -> Column:
    why = F.when(body.isNull(), error)
    return F.struct(body.alias("body"), why.alias("error"))


# Spark reads the first JSON value of a text and ignores what follows it. To notice that, each text
# is read as the first element of an array (or field of an object) whose second one is the text's
# hash, the seal. If the text ends too early, or goes on after its value, the seal is not found in
# its place.


def _listed(text: Column) -> Column:
    """The text and its seal as an array's two values."""
    return F.concat(F.lit("["), text, F.lit(","), F.xxhash64(text), F.lit("]"))


def _is_json(listed: Column, text: Column) -> Column:
    """Whether the array, as VARIANT, ends with the seal of its only other value."""
    return F.coalesce(F.try_variant_get(listed, "$[1]", "bigint") == F.xxhash64(text), F.lit(False))


def _variant(text: Column) -> Column:
    read = F.try_parse_json(_listed(text))
    return _result(
        F.when(_is_json(read, text), F.try_variant_get(read, "$[0]", VARIANT)), F.lit(NOT_JSON)
    )


def _named(text: Column) -> Column:
    """The text and its seal as fields of an object; an array's values would have one type."""
    return F.concat(
        F.lit(f'{{"{_BODY}":'), text, F.lit(f',"{_SEAL}":'), F.xxhash64(text), F.lit("}")
    )


def _typed(text: Column, wanted: DataType) -> Column:
    shape = StructType(
        [
            StructField(_BODY, wanted),
            StructField(_SEAL, LongType()),
            StructField(_BROKEN, StringType()),
        ]
    )
    named = _named(text)
    read = F.from_json(named, shape, _JSON_OPTIONS)
    # A text that goes on with a field, `1,"a":2`, is seen by the object's keys only.
    alone = F.size(F.json_object_keys(named)) == len((_BODY, _SEAL))
    fits = read[_BROKEN].isNull() & (read[_SEAL] == F.xxhash64(text)) & alone
    is_json = _is_json(F.try_parse_json(_listed(text)), text)
    return _result(
        F.when(fits, read[_BODY]), F.when(is_json, F.lit(MISMATCH)).otherwise(F.lit(NOT_JSON))
    )


def _plain(text: Column, wanted: DataType) -> Column:
    return text if isinstance(wanted, StringType) else F.lit(None).cast(wanted)
