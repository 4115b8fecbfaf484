"""Fields of Pydantic models for options that are declared in Python."""

import builtins
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import time, timedelta
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from faststream import AckPolicy
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ModelWrapValidatorHandler,
    ValidationError,
    WithJsonSchema,
    create_model,
    model_validator,
)
from pydantic_core import PydanticCustomError
from sqlalchemy import URL

from faststream_sqlbroker.config.declared import Option
from faststream_sqlbroker.config.plain import format_error, format_requirement
from faststream_sqlbroker.core.checks import suggest_name
from faststream_sqlbroker.core.imports import import_object
from faststream_sqlbroker.core.policies import Header
from faststream_sqlbroker.core.routing import DESTINATION, Destination
from faststream_sqlbroker.core.times import parse_duration
from faststream_sqlbroker.exceptions import SetupError


class Section(BaseModel):
    """A mapping of the file; the error for an unknown key suggests the nearest key."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    @classmethod
    def list_options(cls) -> list[str]:
        """Return the keys as written in the file."""
        return [field.alias or name for name, field in cls.model_fields.items()]

    def get_options(self) -> dict[str, Any]:
        """Return the options that the file sets, by key.

        They are passed to the Python object that the section describes. Omitted options are left
        out, so that they keep the defaults of their declarations.
        """
        fields = type(self).model_fields
        return {
            field.alias or name: getattr(self, name)
            for name, field in fields.items()
            if name in self.model_fields_set
        }

    @model_validator(mode="wrap")
    @classmethod
    def _suggest_nearest(cls, data: Any, handler: ModelWrapValidatorHandler[Any]) -> Any:
        """Validate the section, and convert Pydantic's errors to the terms of the file."""
        try:
            return handler(data)
        except ValidationError as error:
            names = cls.list_options()
            details: Any = [_convert_error(dict(detail), names) for detail in error.errors()]
            raise ValidationError.from_exception_data(cls.__name__, details) from None


def _convert_error(detail: dict[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """Convert an error to the terms of the file; errors of inner sections are already converted.

    `names` are the keys that the section allows. An error with a path of one step is about a key of
    this section.
    """
    kind = detail["type"]
    is_direct = len(detail["loc"]) == 1
    if kind == "extra_forbidden" and is_direct:
        name = str(detail["loc"][0])
        text = f"unknown option {name!r}: {suggest_name(name, names)}"
        return create_error(UNKNOWN, text, detail["loc"])
    if kind == "missing" and is_direct:
        return create_error(MISSING, f"the option {detail['loc'][0]!r} is required", detail["loc"])
    if kind == "model_type" and not detail["loc"]:
        return create_error(
            kind, format_requirement(f"a mapping of {', '.join(names)}", detail["input"])
        )
    return create_error(kind, format_error(kind, detail["msg"], detail["input"]), detail["loc"])


UNKNOWN = "unknown_option"
MISSING = "needed_option"


def create_error(kind: str, text: str, loc: Any = ()) -> dict[str, Any]:
    """Return an error in Pydantic's form."""
    return {"type": PydanticCustomError(kind, "{text}", {"text": text}), "loc": loc, "input": None}


def convert_setup_error(create: Callable[..., Any], *arguments: Any) -> Any:
    """Return `create(*arguments)`; a SetupError becomes an error at the validated value.

    Pydantic collects its own errors only, and adds the path of the value in the file.
    """
    try:
        return create(*arguments)
    except SetupError as error:
        raise PydanticCustomError("setup", "{text}", {"text": str(error)}) from None


_LEADING_NAME = re.compile(r"(?:[A-Z]\w*'s )?'?(\w+)")


def find_option(text: str) -> str | None:
    """Return the option at the beginning of an error message, or None.

    Errors begin with the name of the option, which leads to its line in the file.
    """
    match = _LEADING_NAME.match(text)
    return match[1] if match else None


# Types of single values.


def _validate_length(value: Any) -> Any:
    convert_setup_error(parse_duration, value)
    return value


def _validate_key(value: Any) -> Any:
    return value if isinstance(value, bool) else _parse_header(value)


def _parse_header(value: Any) -> Any:
    """Convert a mapping such as {"header": "tenant"} to a Header; refuse other values.

    A Header names the header of a message that a policy uses as its key.
    """
    if isinstance(value, dict) and value.keys() == {"header"}:
        return convert_setup_error(Header, value["header"])
    text = format_requirement("a mapping with the key 'header'", value)
    raise PydanticCustomError("header", "{text}", {"text": text})


def _parse_ack_policy(value: Any) -> Any:
    return AckPolicy[value.upper()]


def _parse_forward_to(value: Any) -> Any:
    return DESTINATION if value == TO_DESTINATION else value


def _load_error_classes(value: Any) -> Any:
    """Return the exception classes for a name or a list of names."""
    names = value if isinstance(value, list) else [value]
    return tuple(convert_setup_error(_load_error_class, name) for name in names)


def _load_error_class(name: Any) -> Any:
    """Return the exception class for the name of a built-in class, or for `module:name`.

    A file names classes of exceptions where Python's option takes the classes themselves.

    Raises:
        SetupError: there is no such class.
    """
    if isinstance(name, str) and ":" not in name:
        value = getattr(builtins, name, None)
        if not isinstance(value, type) or not issubclass(value, BaseException):
            raise SetupError(f"{name!r} is not a built-in exception: write others as module:name")
        return value
    if not isinstance(name, str):
        raise SetupError("write the name of an exception, or a list of names")
    return import_object(name, option="the exception")


TO_DESTINATION = "DESTINATION"
"""Value of `forward_to` for Python's `DESTINATION`."""
_TEXT_OR_TEXTS: dict[str, Any] = {
    "anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]
}
_HEADER: dict[str, Any] = {
    "type": "object",
    "properties": {"header": {"type": "string"}},
    "required": ["header"],
    "additionalProperties": False,
}
Length = Annotated[
    Any,
    AfterValidator(_validate_length),
    WithJsonSchema({"type": ["string", "number"], "examples": ["5m"]}),
]
HeaderField = Annotated[Any, AfterValidator(_parse_header), WithJsonSchema(_HEADER)]
KeyField = Annotated[
    Any, AfterValidator(_validate_key), WithJsonSchema({"anyOf": [{"type": "boolean"}, _HEADER]})
]
ErrorNames = Annotated[Any, AfterValidator(_load_error_classes), WithJsonSchema(_TEXT_OR_TEXTS)]
_ACK_POLICIES = tuple(policy.name.lower() for policy in AckPolicy)
AckPolicyField = Annotated[Literal[_ACK_POLICIES], AfterValidator(_parse_ack_policy)]  # type: ignore[valid-type]
ForwardTo = Annotated[str, AfterValidator(_parse_forward_to)]

_UNIONS = (
    ({float, timedelta, str}, Length),
    ({bool, Header}, KeyField),
    ({Header}, HeaderField),
    ({str, Destination}, ForwardTo),
    ({time}, None),
    ({URL}, None),
)
"""Members of a union that one field represents; None if the union's text is sufficient."""


def get_field_type(hint: Any, object_types: Mapping[Any, Any]) -> Any:
    """Return the field type for an option of the type `hint`, or from `object_types`.

    `hint` is the annotation in Python. `object_types` has the fields of types that a file writes as
    a mapping, such as a policy.

    Raises:
        TypeError: a file has no form for such an option.
    """
    if hint in object_types:
        return object_types[hint]
    if hint in {bool, int, float, str, Any, NoneType} or get_origin(hint) is Literal:
        return hint
    if hint is AckPolicy:
        return AckPolicyField
    origin = get_origin(hint)
    arguments = get_args(hint)
    if origin in {Union, UnionType}:
        return _create_union(set(arguments), object_types)
    if origin in {Sequence, Iterable, list}:
        return list[get_field_type(arguments[0], object_types)]  # type: ignore[misc]
    if origin in {Mapping, dict}:
        return dict[str, get_field_type(arguments[1], object_types)]  # type: ignore[misc]
    raise TypeError(f"a YAML file cannot contain options of the type {hint}")


def _create_union(members: set[Any], object_types: Mapping[Any, Any]) -> Any:
    """Return the field type for a union of option types, which are the `members`.

    A value of the file must fit one of the resulting types. Exception classes are written by name.
    `_UNIONS` lists members that one field represents, such as the types of a duration.
    """
    if any(get_origin(member) is type for member in members):
        return ErrorNames | None if NoneType in members else ErrorNames
    types: list[Any] = []
    for covered, kind in _UNIONS:
        if covered <= members:
            members = members - covered
            types += [] if kind is None else [kind]
    # Sorted, so that the JSON Schema is reproducible.
    types += [
        get_field_type(member, object_types) for member in sorted(members - {NoneType}, key=str)
    ]
    types += [NoneType] * (NoneType in members)
    return Union[tuple(types)]  # noqa: UP007 - of a list


# Models.


def create_section(
    name: str,
    options: Iterable[Option],
    *,
    base: type[Section] = Section,
    object_types: Mapping[Any, Any] | None = None,
    hidden: Sequence[str] = (),
) -> type[Any]:
    """Create a section with a field for each option.

    So the keys of a file are always those of the Python declarations.

    Args:
        name: Name of the model.
        options: Declared options.
        base: Base class, which may have additional fields.
        object_types: Types of fields, by types of options.
        hidden: Options that the model's `repr` omits.
    """
    fields: dict[str, Any] = {}
    for option in options:
        # A factory, so that the JSON Schema does not show null as the default.
        default: Any = {} if option.is_required else {"default_factory": NoneType}
        field = Field(
            **default,
            alias=option.name,
            description=option.description,
            repr=option.name not in hidden,
        )
        # A prefix, because Pydantic's models have attributes such as `schema` and `copy`.
        fields[f"option_{option.name}"] = (get_field_type(option.hint, object_types or {}), field)
    return create_model(name, __base__=base, **fields)


def create_object_field(
    model: type[Any], create: Callable[..., Any], *, short: str | None = None
) -> Any:
    """Return the type of a field whose value is `create(**options)`.

    Args:
        model: Model of the options.
        create: Creates the value from the options.
        short: Option that is set by a value that is not a mapping.
    """

    def expand(value: Any) -> Any:
        """Make a mapping of a single value, such as 5m in `delay: 5m`, for the option `short`."""
        return value if short is None or isinstance(value, dict) else {short: value}

    def create_value(section: Section) -> Any:
        """Create the object; an error is reported at the option that the message names.

        The constructor's messages begin with that name.
        """
        try:
            return create(**section.get_options())
        except SetupError as error:
            text = str(error)
            loc = tuple(name for name in section.list_options() if name == find_option(text))
            details: Any = [create_error("setup", text, loc)]
            raise ValidationError.from_exception_data(model.__name__, details) from None

    kind: Any = Annotated[model, BeforeValidator(expand), AfterValidator(create_value)]
    return kind if short is None else Annotated[kind, _SingleValueSchema()]


class _SingleValueSchema:
    """JSON Schema of a mapping or a single value."""

    def __get_pydantic_json_schema__(self, schema: Any, handler: Any) -> dict[str, Any]:
        return {"anyOf": [handler(schema), {"type": ["string", "number"]}]}


def create_choice(name: str, kinds: Mapping[str, Any], descriptions: Mapping[str, str]) -> Any:
    """Return the type of a field with exactly one key of several; the value is the key's value.

    Such a field is a policy or a retry strategy: `throttle: {...}` gives a Throttle. `kinds` has
    the types of the keys' values, `descriptions` texts for the JSON Schema.
    """
    fields: dict[str, Any] = {
        f"option_{key}": (
            kind,
            Field(default_factory=NoneType, alias=key, description=descriptions.get(key)),
        )
        for key, kind in kinds.items()
    }
    model = create_model(
        name,
        __base__=_ChoiceSection,
        __cls_kwargs__={"json_schema_extra": {"minProperties": 1, "maxProperties": 1}},
        **fields,
    )

    def get_value(section: Section) -> Any:
        """Return the value of the only key, for example the policy itself."""
        return next(iter(section.get_options().values()))

    field: Any = Annotated[model, AfterValidator(get_value)]
    return field


class _ChoiceSection(Section):
    """A mapping with a single key."""

    @model_validator(mode="after")
    def _check_single_key(self) -> Any:
        """Refuse a choice with no key, or with several."""
        if len(self.model_fields_set) != 1:
            text = f"exactly one of {', '.join(self.list_options())} is required"
            raise PydanticCustomError("one_of", "{text}", {"text": text})
        return self
