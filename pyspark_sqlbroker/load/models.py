"""Pydantic models as Spark schemas of the JSON that they read."""

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

from faststream_sqlbroker.core.text import format_value
from faststream_sqlbroker.exceptions import SetupError

_SCALAR_TYPES: dict[Any, DataType] = {
    bool: BooleanType(),
    int: LongType(),
    float: DoubleType(),
    # As Pydantic writes bytes and UUIDs into JSON: text, or text in base64 or hex.
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
_LIST_TYPES = (
    list,
    set,
    frozenset,
    collections.abc.Sequence,
    collections.abc.Set,
    collections.abc.Iterable,
)
_MAP_TYPES = (dict, collections.abc.Mapping, collections.abc.MutableMapping)
MAX_DIGITS = 38
"""Maximum number of digits of Spark's decimals."""

DEFAULT_SCALE = 18
"""Digits after the point if the model does not specify them; Spark's default for Decimal."""


def struct_of(model: type[BaseModel], *, by_alias: bool = True) -> StructType:
    """Return the schema of the JSON bodies that a Pydantic model reads; every field is nullable.

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

    DECIMAL(38, 18) has 20 digits before the point: a body with more is NULL as a whole, even if
    `max_digits` allows them, so give `decimal_places` too. More digits after the point are rounded
    off.

    Args:
        model: The class.
        by_alias: Name the fields by their alias, if they have one (the first of AliasChoices).
            False uses the names in the class.

    Raises:
        SetupError: an annotation without a counterpart (it names the field), a model that contains
            itself, `model` is no class of Pydantic's, or a RootModel, whose JSON is its root's.
    """
    if not (isinstance(model, type) and issubclass(model, BaseModel)):
        raise SetupError(f"struct_of takes a Pydantic model class, got {format_value(model)}")
    if issubclass(model, RootModel):
        raise SetupError(
            f"{model.__name__} is a RootModel, and its JSON has no field root: give the model of "
            'the root, or give decode_payload the DDL of the root, such as "ARRAY<BIGINT>", or '
            '"variant"'
        )
    return _build_struct(model, model.__name__, by_alias, ())


def _build_struct(
    model: type[BaseModel], path: str, by_alias: bool, parents: tuple[type, ...]
) -> StructType:
    """Convert the fields of a model; `parents` are the models that contain it as a field.

    `path` names the model in errors.
    """
    _check_cycle(model, path, parents)
    fields = []
    for name, info in model.model_fields.items():
        field_path = f"{path}.{name}"
        alias = _get_alias(info, field_path) if by_alias else None
        convert = _Converter(field_path, by_alias, (*parents, model))
        fields.append(StructField(alias or name, convert(info.annotation, tuple(info.metadata))))
    return StructType(fields)


def _check_cycle(model: type[BaseModel], path: str, parents: tuple[type, ...]) -> None:
    """Refuse a model that is among its own `parents`: Spark's types cannot be recursive."""
    if model in parents:
        raise SetupError(
            f"{path}: {model.__name__} contains itself, which Spark schemas do not support; {_HINT}"
        )


_HINT = 'annotate it as Any (it becomes VARIANT), or give decode_payload a DDL or "variant"'


def _get_alias(info: FieldInfo, field_path: str) -> str | None:
    """Return a field's alias, the name in JSON, or None; of several choices the first name.

    The validation alias counts, as bodies are read and not written.
    """
    alias = info.validation_alias if info.validation_alias is not None else info.alias
    if isinstance(alias, AliasChoices):
        alias = next(
            (choice for choice in alias.choices if isinstance(choice, str)), alias.choices[0]
        )
    if isinstance(alias, AliasPath):
        raise SetupError(
            f"{field_path} is read from a path (AliasPath), which Spark schemas do not support: "
            f"{_HINT}"
        )
    return alias


def _iter_constraints(annotations: tuple[Any, ...]) -> Iterator[Any]:
    """Yield the constraints in the metadata of `Annotated`, also from within `Field(…)`."""
    for annotation in annotations:
        if isinstance(annotation, FieldInfo):
            yield from annotation.metadata
        else:
            yield annotation


@dataclass(frozen=True)
class _Converter:
    """Converts the annotation of a field into a type."""

    field_path: str
    by_alias: bool
    parents: tuple[type, ...]

    def __call__(self, annotation: Any, metadata: tuple[Any, ...] = ()) -> DataType:
        """Convert an annotation; `metadata` has the constraints, such as max_digits.

        Calls itself for the parts of an annotation, such as X of list[X]. None in a union adds
        nothing, as every column of Spark may be NULL.
        """
        if annotation is Decimal:
            return self._convert_decimal(metadata)
        if isinstance(annotation, collections.abc.Hashable) and annotation in _SCALAR_TYPES:
            return _SCALAR_TYPES[annotation]
        origin = get_origin(annotation)
        arguments = get_args(annotation)
        if origin is Annotated:
            return self(arguments[0], (*metadata, *_iter_constraints(arguments[1:])))
        if origin in (Union, types.UnionType):
            return self._convert_same(
                [a for a in arguments if a is not type(None)], annotation, metadata
            )
        if origin is Literal:
            return self._convert_same(
                [type(value) for value in arguments if value is not None], annotation
            )
        if origin is not None:
            return self._convert_generic(origin, arguments, annotation)
        return self._convert_class(annotation)

    def _convert_class(self, annotation: Any) -> DataType:
        """Convert a class other than the scalar types: a model, an Enum or a subclass of str.

        A RootModel is a BaseModel too, but its JSON is that of its root, so it comes first.
        """
        if not isinstance(annotation, type):
            raise self._build_error(annotation)
        if issubclass(annotation, RootModel):
            return self._convert_root(annotation)
        if issubclass(annotation, BaseModel):
            return _build_struct(annotation, self.field_path, self.by_alias, self.parents)
        if issubclass(annotation, Enum):
            return self._convert_same([type(member.value) for member in annotation], annotation)
        if issubclass(annotation, str):
            return StringType()
        raise self._build_error(annotation)

    def _convert_root(self, model: type[RootModel[Any]]) -> DataType:
        """Convert a RootModel, whose JSON is the bare root."""
        _check_cycle(model, self.field_path, self.parents)
        info = model.model_fields["root"]
        convert = _Converter(self.field_path, self.by_alias, (*self.parents, model))
        return convert(info.annotation, tuple(info.metadata))

    def _convert_generic(
        self, origin: Any, arguments: tuple[Any, ...], annotation: Any
    ) -> DataType:
        """Convert a list, tuple[X, ...] or mapping; a mapping needs keys of type str.

        `origin` is the class without its arguments, such as `list` of `list[int]`. JSON has only
        texts as keys, and a Spark array only values of one type.
        """
        if origin in _LIST_TYPES:
            return ArrayType(self(arguments[0]))
        if origin is tuple and len(arguments) == 2 and arguments[1] is Ellipsis:  # noqa: PLR2004 - tuple[X, ...]
            return ArrayType(self(arguments[0]))
        if origin in _MAP_TYPES and isinstance(self(arguments[0]), StringType):
            return MapType(StringType(), self(arguments[1]))
        raise self._build_error(annotation)

    def _convert_same(
        self, members: list[Any], annotation: Any, metadata: tuple[Any, ...] = ()
    ) -> DataType:
        """Return the common type of all members, such as those of a Union or an Enum.

        A column has one type, so members of several types raise the error about `annotation`.
        """
        types_ = [self(member, metadata) for member in members]
        if not types_ or any(type_ != types_[0] for type_ in types_):
            raise self._build_error(annotation)
        return types_[0]

    def _convert_decimal(self, metadata: tuple[Any, ...]) -> DataType:
        """Convert Decimal to Spark's type, with the digits that the constraints allow.

        Spark needs both numbers: all digits, and digits after the point (the scale). Without
        `max_digits`, or without `decimal_places`, the precision is `MAX_DIGITS`; without
        `decimal_places` the scale is `DEFAULT_SCALE`.
        """
        digits = next(
            (
                constraint.max_digits
                for constraint in metadata
                if getattr(constraint, "max_digits", None)
            ),
            None,
        )
        scales = [
            constraint.decimal_places
            for constraint in metadata
            if getattr(constraint, "decimal_places", None) is not None
        ]
        scale = scales[0] if scales else DEFAULT_SCALE
        # Without decimal_places, all digits may stand before the point or after it.
        precision = digits if digits is not None and scales else MAX_DIGITS
        if (digits or 0) > MAX_DIGITS or scale > precision:
            raise SetupError(
                f"{self.field_path} has decimals of {digits} digits, {scale} of them after the "
                f"point: Spark allows at most {MAX_DIGITS} digits, and no more after the point "
                "than in all"
            )
        return DecimalType(precision, scale)

    def _build_error(self, annotation: Any) -> SetupError:
        """Create the error about an annotation without a counterpart in Spark."""
        name = annotation.__name__ if isinstance(annotation, type) else str(annotation)
        return SetupError(
            f"{self.field_path} is annotated {name}, which has no counterpart in Spark: {_HINT}"
        )
