"""Pydantic models as Spark's schemas of the JSON that they read."""

import collections.abc
import types
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import date, datetime
from decimal import Decimal
from enum import Enum
from typing import Annotated, Any, Literal, Union, get_args, get_origin
from uuid import UUID

from pydantic import (
    AliasChoices,
    AliasPath,
    AwareDatetime,
    BaseModel,
    FutureDate,
    FutureDatetime,
    NaiveDatetime,
    PastDate,
    PastDatetime,
    RootModel,
)
from pydantic.fields import FieldInfo
from pyspark.sql.types import (
    ArrayType,
    BooleanType,
    DataType,
    DateType,
    DecimalType,
    DoubleType,
    LongType,
    MapType,
    StringType,
    StructField,
    StructType,
    TimestampNTZType,
    TimestampType,
    VariantType,
)

from faststream_sqlbroker.core.text import short
from faststream_sqlbroker.exceptions import SetupError

_SCALARS: dict[Any, DataType] = {
    bool: BooleanType(),
    int: LongType(),
    float: DoubleType(),
    # As Pydantic writes them into JSON: text, or text in base64 or hex.
    bytes: StringType(),
    UUID: StringType(),
    datetime: TimestampType(),
    AwareDatetime: TimestampType(),
    PastDatetime: TimestampType(),
    FutureDatetime: TimestampType(),
    NaiveDatetime: TimestampNTZType(),
    date: DateType(),
    PastDate: DateType(),
    FutureDate: DateType(),
    Any: VariantType(),
    object: VariantType(),
}
_LISTS = (
    list,
    set,
    frozenset,
    collections.abc.Sequence,
    collections.abc.Set,
    collections.abc.Iterable,
)
_MAPS = (dict, collections.abc.Mapping, collections.abc.MutableMapping)
MOST_DIGITS = 38
"""Digits of Spark's longest decimal."""

DEFAULT_SCALE = 18
"""Digits after the point where the model does not say; Spark's default for Python's Decimal."""


def struct_of(model: type[BaseModel], *, by_alias: bool = True) -> StructType:
    """The schema of the JSON bodies that a Pydantic model reads; every field is nullable.

    | annotation | Spark |
    |---|---|
    | bool, int, float | BOOLEAN, BIGINT, DOUBLE |
    | str and its subclasses, UUID, bytes (as Pydantic writes them in JSON) | STRING |
    | datetime, AwareDatetime; NaiveDatetime | TIMESTAMP; TIMESTAMP_NTZ |
    | date | DATE |
    | Decimal | DECIMAL(max_digits, decimal_places) |
    | Decimal without max_digits; without decimal_places | DECIMAL(38, decimal_places); (38, 18) |
    | Enum, Literal | the type of its values |
    | Optional[X], Annotated[X, …] | as X |
    | list, set, frozenset, Sequence, tuple[X, ...] of X | ARRAY<X> |
    | dict, Mapping from str to X | MAP<STRING, X> |
    | a model; a RootModel | STRUCT; as its root |
    | Any | VARIANT |

    DECIMAL(38, 18) has room for 20 digits before the point: a body with more is NULL as a whole,
    also where `max_digits` allows them, so give `decimal_places` too. Digits that have no room
    after the point are rounded off.

    Args:
        model: The class.
        by_alias: Name the fields as the model reads them: by their alias where they have one (the
            first of AliasChoices). False names them as the class does.

    Raises:
        SetupError: an annotation without a counterpart (it names the field), a model that contains
            itself, `model` is no class of Pydantic's, or a RootModel, whose JSON is its root's.
    """
    if not (isinstance(model, type) and issubclass(model, BaseModel)):
        raise SetupError(f"struct_of takes a Pydantic model class, got {short(model)}")
    if issubclass(model, RootModel):
        raise SetupError(
            f"{model.__name__} is a RootModel, whose JSON has no field root: give the model that "
            'is its root, or give decode_payload the DDL of the root, such as "ARRAY<BIGINT>", or '
            '"variant"'
        )
    return _struct(model, model.__name__, by_alias, ())


def _struct(
    model: type[BaseModel], path: str, by_alias: bool, above: tuple[type, ...]
) -> StructType:
    _refuse_cycle(model, path, above)
    fields = []
    for name, info in model.model_fields.items():
        place = f"{path}.{name}"
        shown = _alias(info, place) if by_alias else None
        convert = _Converter(place, by_alias, (*above, model))
        fields.append(StructField(shown or name, convert(info.annotation, tuple(info.metadata))))
    return StructType(fields)


def _refuse_cycle(model: type[BaseModel], path: str, above: tuple[type, ...]) -> None:
    if model in above:
        raise SetupError(
            f"{path}: {model.__name__} contains itself, which no schema of Spark can; {_ADVICE}"
        )


_ADVICE = 'annotate it as Any (it becomes VARIANT), or give decode_payload a DDL or "variant"'


def _alias(info: FieldInfo, place: str) -> str | None:
    alias = info.validation_alias if info.validation_alias is not None else info.alias
    if isinstance(alias, AliasChoices):
        alias = next(
            (choice for choice in alias.choices if isinstance(choice, str)), alias.choices[0]
        )
    if isinstance(alias, AliasPath):
        raise SetupError(
            f"{place} is read from a path (AliasPath), which no field of Spark can: {_ADVICE}"
        )
    return alias


def _constraints(annotations: tuple[Any, ...]) -> Iterator[Any]:
    """What `Annotated` says of a type, also inside of `Field(…)`."""
    for each in annotations:
        if isinstance(each, FieldInfo):
            yield from each.metadata
        else:
            yield each


@dataclass(frozen=True)
class _Converter:
    """Turns the annotation of one field into a type."""

    place: str
    by_alias: bool
    above: tuple[type, ...]

    def __call__(self, annotation: Any, metadata: tuple[Any, ...] = ()) -> DataType:
        if annotation is Decimal:
            return self._decimal(metadata)
        if isinstance(annotation, collections.abc.Hashable) and annotation in _SCALARS:
            return _SCALARS[annotation]
        origin = get_origin(annotation)
        arguments = get_args(annotation)
        if origin is Annotated:
            return self(arguments[0], (*metadata, *_constraints(arguments[1:])))
        if origin in (Union, types.UnionType):
            return self._same([a for a in arguments if a is not type(None)], annotation, metadata)
        if origin is Literal:
            return self._same([type(value) for value in arguments if value is not None], annotation)
        if origin is not None:
            return self._generic(origin, arguments, annotation)
        return self._class(annotation)

    def _class(self, annotation: Any) -> DataType:
        if not isinstance(annotation, type):
            raise self._unknown(annotation)
        if issubclass(annotation, RootModel):
            return self._root(annotation)
        if issubclass(annotation, BaseModel):
            return _struct(annotation, self.place, self.by_alias, self.above)
        if issubclass(annotation, Enum):
            return self._same([type(member.value) for member in annotation], annotation)
        if issubclass(annotation, str):
            return StringType()
        raise self._unknown(annotation)

    def _root(self, model: type[RootModel[Any]]) -> DataType:
        """In JSON it is its bare root."""
        _refuse_cycle(model, self.place, self.above)
        info = model.model_fields["root"]
        convert = _Converter(self.place, self.by_alias, (*self.above, model))
        return convert(info.annotation, tuple(info.metadata))

    def _generic(self, origin: Any, arguments: tuple[Any, ...], annotation: Any) -> DataType:
        if origin in _LISTS:
            return ArrayType(self(arguments[0]))
        if origin is tuple and len(arguments) == 2 and arguments[1] is Ellipsis:  # noqa: PLR2004 - tuple[X, ...]
            return ArrayType(self(arguments[0]))
        if origin in _MAPS and isinstance(self(arguments[0]), StringType):
            return MapType(StringType(), self(arguments[1]))
        raise self._unknown(annotation)

    def _same(
        self, members: list[Any], annotation: Any, metadata: tuple[Any, ...] = ()
    ) -> DataType:
        """The one type of all members."""
        found = [self(member, metadata) for member in members]
        if not found or any(kind != found[0] for kind in found):
            raise self._unknown(annotation)
        return found[0]

    def _decimal(self, metadata: tuple[Any, ...]) -> DataType:
        digits = next((m.max_digits for m in metadata if getattr(m, "max_digits", None)), None)
        scales = [
            m.decimal_places for m in metadata if getattr(m, "decimal_places", None) is not None
        ]
        scale = scales[0] if scales else DEFAULT_SCALE
        # Without the places, so many digits may stand before the point or after it.
        precision = digits if digits is not None and scales else MOST_DIGITS
        if (digits or 0) > MOST_DIGITS or scale > precision:
            raise SetupError(
                f"{self.place} has decimals of {digits} digits, {scale} after the point: Spark "
                f"has at most {MOST_DIGITS} digits, and no more after the point than in all"
            )
        return DecimalType(precision, scale)

    def _unknown(self, annotation: Any) -> SetupError:
        shown = annotation.__name__ if isinstance(annotation, type) else str(annotation)
        return SetupError(
            f"{self.place} is annotated {shown}, which has no counterpart in Spark: {_ADVICE}"
        )
