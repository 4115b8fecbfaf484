"""Payloads as values: JSON and text by their content type, everything else NULL."""

from typing import Any

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql.types import DataType, LongType, StringType, StructField, StructType, VariantType

from faststream_sqlbroker.core.text import format_value
from faststream_sqlbroker.exceptions import SetupError

VARIANT = "variant"

NOT_UTF8 = "not_utf8"
NOT_JSON = "not_json"
MISMATCH = "mismatch"
CONTENT_TYPE = "content_type"

_BODY_FIELD = "v"
_SEAL_FIELD = "s"
_CORRUPT_FIELD = "c"
_JSON_OPTIONS = {
    "columnNameOfCorruptRecord": _CORRUPT_FIELD,
    "allowSingleQuotes": "false",
    # Times without an offset would be read in the session's time zone.
    "timeZone": "UTC",
}


def decode_payload(
    frame: DataFrame, schema: Any = VARIANT, *, column: str = "body", error: str | None = None
) -> DataFrame:
    """Add the decoded payload as a column; a payload that cannot be read is NULL, never an error.

    The header content-type decides, in any case of letters and with any parameters:
    "application/json" and "…+json" are JSON, "text/…" is a text, any other content type is not
    decoded. A message without the header is read as in FastStream: as JSON, if it is JSON. The
    payload must be UTF-8. An object that names a field twice is no JSON for "variant"; with a
    schema the last value is used.

    Args:
        frame: A DataFrame with the columns `payload` and `headers` of `ARCHIVE_SCHEMA` or
            `MESSAGE_SCHEMA`.
        schema: "variant", for bodies of any structure: `body:user.id::int` in SQL, `variant_get` in
            Python. Or the type of the bodies, which is twice as fast: a `DataType`, its DDL ("user
            INT, amount DOUBLE"), or a Pydantic model class (see `struct_of`). A body that contains
            a value of another type is NULL as a whole; missing fields are NULL, and fields that the
            schema does not name are left out.
        column: The new column's name.
        error: Name of a second column (STRING) with the reason why the first is NULL; None adds no
            column. The reason is "content_type" (neither JSON nor text), "not_utf8", "not_json", or
            "mismatch" (another type than in the schema); NULL where the body was decoded.

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
    data_type = _parse_data_type(schema)
    kind = _classify_content()
    text = F.try_validate_utf8(F.col("payload").cast("string"))
    parsed = (
        _parse_variant(text)
        if isinstance(data_type, VariantType)
        else _parse_typed(text, data_type)
    )
    plain = (
        text.cast(VARIANT) if isinstance(data_type, VariantType) else _convert_text(text, data_type)
    )
    # One struct is computed once for each row; its two fields become the new columns.
    result = (
        F.when(
            kind == CONTENT_TYPE, _build_result(F.lit(None).cast(data_type), F.lit(CONTENT_TYPE))
        )
        .when(text.isNull(), _build_result(F.lit(None).cast(data_type), F.lit(NOT_UTF8)))
        .when(kind == "text", _build_result(plain, F.lit(MISMATCH)))
        .otherwise(parsed)
    )
    inner = f"{column} {error or ''} decoded"
    decoded = frame.withColumn(inner, result).withColumn(column, F.col(f"`{inner}`.body"))
    if error is not None:
        decoded = decoded.withColumn(error, F.col(f"`{inner}`.error"))
    return decoded.drop(inner)


def get_header(path: str) -> Column:
    """Return the text of a header by a JSON path below `$`, such as "['dead-letter'].queue"."""
    return F.get_json_object(F.col("headers"), f"${path}")


def _parse_data_type(schema: Any) -> DataType:
    """Return the Spark type of `schema`: a type, a Pydantic model, DDL, or "variant".

    DDL is Spark's text for the columns of a table, such as "user INT, amount DOUBLE".
    """
    if isinstance(schema, DataType):
        return schema
    if isinstance(schema, type) and hasattr(schema, "model_fields"):
        from pyspark_sqlbroker.load.models import struct_of  # noqa: PLC0415 - only who has models has Pydantic

        return struct_of(schema)
    if not isinstance(schema, str):
        raise SetupError(
            'schema must be "variant", a DataType, its DDL such as "user INT, amount DOUBLE", or '
            f"a Pydantic model class, got {format_value(schema)}"
        )
    try:
        return VariantType() if schema.strip().lower() == VARIANT else DataType.fromDDL(schema)
    except Exception as error:
        msg = (
            f'schema {format_value(schema)} is not valid DDL: write it like "user INT, amount '
            'DOUBLE"'
        )
        raise SetupError(msg) from error


def _classify_content() -> Column:
    """Return the kind of content by the header content-type: "json", "text" or CONTENT_TYPE.

    CONTENT_TYPE means that the payload is not decoded. Without the header it is read as JSON. The
    name is looked up as FastStream spells it first, then in any case of letters.
    """
    # Names of headers keep their case in the table; most are spelled as FastStream does.
    fields = F.map_entries(F.from_json(F.col("headers"), "map<string, string>"))
    matching = F.filter(fields, lambda field: F.lower(field["key"]) == "content-type")
    content_type = F.coalesce(get_header("['content-type']"), F.get(matching, 0)["value"])
    media = F.lower(F.trim(F.split(content_type, ";").getItem(0)))
    is_json = (
        media.isNull() | (media == "") | (media == "application/json") | media.endswith("+json")
    )
    return F.when(is_json, "json").when(media.startswith("text/"), "text").otherwise(CONTENT_TYPE)


def _build_result(body: Column, error: Column) -> Column:
    """Return body and error as a struct; the error only where the body is NULL."""
    reason = F.when(body.isNull(), error)
    return F.struct(body.alias("body"), reason.alias("error"))


# Spark reads the first JSON value of a text and ignores the rest. To detect that, each text is read
# as the first element of an array (or field of an object) whose second element is the text's hash,
# the seal. If the text ends too early, or continues after its value, the seal is not at its
# position.


def _build_sealed_array(text: Column) -> Column:
    """Return text and seal, a hash of the text, as the JSON text of an array of two values.

    Spark would ignore what follows the first JSON value of a text; `_build_is_json` detects that.
    """
    return F.concat(F.lit("["), text, F.lit(","), F.xxhash64(text), F.lit("]"))


def _build_is_json(sealed: Column, text: Column) -> Column:
    """Return True if the array, as VARIANT, ends with the seal of the only other value.

    The seal is a hash of the text. It is the second element only if the text is one JSON value.
    """
    return F.coalesce(F.try_variant_get(sealed, "$[1]", "bigint") == F.xxhash64(text), F.lit(False))


def _parse_variant(text: Column) -> Column:
    """Parse the text as VARIANT; the seal proves that the whole text is a single JSON value.

    The text is parsed as the first element of an array whose second element, the seal, is a hash of
    the text: Spark alone would accept a text that continues after a JSON value.
    """
    parsed = F.try_parse_json(_build_sealed_array(text))
    return _build_result(
        F.when(_build_is_json(parsed, text), F.try_variant_get(parsed, "$[0]", VARIANT)),
        F.lit(NOT_JSON),
    )


def _build_sealed_object(text: Column) -> Column:
    """Return text and seal, a hash of the text, as fields of a JSON object.

    An array would not do here, as `from_json` gives all its values one type.
    """
    return F.concat(
        F.lit(f'{{"{_BODY_FIELD}":'),
        text,
        F.lit(f',"{_SEAL_FIELD}":'),
        F.xxhash64(text),
        F.lit("}"),
    )


def _parse_typed(text: Column, data_type: DataType) -> Column:
    """Parse the text as `data_type`, with the reason if that fails.

    The text counts only if the seal after it is intact and no other field was added; otherwise it
    is valid JSON of another type ("mismatch") or no JSON ("not_json").
    """
    schema = StructType(
        [
            StructField(_BODY_FIELD, data_type),
            StructField(_SEAL_FIELD, LongType()),
            StructField(_CORRUPT_FIELD, StringType()),
        ]
    )
    sealed = _build_sealed_object(text)
    parsed = F.from_json(sealed, schema, _JSON_OPTIONS)
    # A text that continues with a field, `1,"a":2`, is detected by the object's keys only.
    has_two_fields = F.size(F.json_object_keys(sealed)) == len((_BODY_FIELD, _SEAL_FIELD))
    matches = (
        parsed[_CORRUPT_FIELD].isNull() & (parsed[_SEAL_FIELD] == F.xxhash64(text)) & has_two_fields
    )
    is_json = _build_is_json(F.try_parse_json(_build_sealed_array(text)), text)
    return _build_result(
        F.when(matches, parsed[_BODY_FIELD]),
        F.when(is_json, F.lit(MISMATCH)).otherwise(F.lit(NOT_JSON)),
    )


def _convert_text(text: Column, data_type: DataType) -> Column:
    """Return the text of a message of type text/…; NULL if the schema is not STRING.

    A text is not parsed, so no other type can be made of it.
    """
    return text if isinstance(data_type, StringType) else F.lit(None).cast(data_type)
