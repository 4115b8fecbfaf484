"""Options that are declared in Python, as fields of Pydantic models."""

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
from faststream_sqlbroker.config.plain import must_be, plain
from faststream_sqlbroker.core.checks import nearest
from faststream_sqlbroker.core.imports import imported
from faststream_sqlbroker.core.policies import Header
from faststream_sqlbroker.core.routing import DESTINATION, Destination
from faststream_sqlbroker.core.times import parse_duration
from faststream_sqlbroker.exceptions import SetupError


class Section(BaseModel):
    """A mapping of the file. A key that it does not know is a mistake, which names the nearest."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    @classmethod
    def option_names(cls) -> list[str]:
        """The keys, as they are written."""
        return [field.alias or name for name, field in cls.model_fields.items()]

    def given(self) -> dict[str, Any]:
        """What the file gives, by the keys as they are written."""
        fields = type(self).model_fields
        return {
            field.alias or name: getattr(self, name)
            for name, field in fields.items()
            if name in self.model_fields_set
        }

    @model_validator(mode="wrap")
    @classmethod
    def _name_the_nearest(cls, data: Any, handler: ModelWrapValidatorHandler[Any]) -> Any:
        try:
            return handler(data)
        except ValidationError as error:
            names = cls.option_names()
            details: Any = [_told(dict(each), names) for each in error.errors()]
            raise ValidationError.from_exception_data(cls.__name__, details) from None


def _told(detail: dict[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """One mistake, in words of the file; those of inner sections are told already."""
    kind = detail["type"]
    here = len(detail["loc"]) == 1
    if kind == "extra_forbidden" and here:
        name = str(detail["loc"][0])
        text = f"there is no option {name!r}: {nearest(name, names)}"
        return told(UNKNOWN, text, detail["loc"])
    if kind == "missing" and here:
        return told(NEEDED, f"the option {detail['loc'][0]!r} is needed", detail["loc"])
    if kind == "model_type" and not detail["loc"]:
        return told(kind, must_be(f"a mapping of {', '.join(names)}", detail["input"]))
    return told(kind, plain(kind, detail["msg"], detail["input"]), detail["loc"])


UNKNOWN = "unknown_option"
NEEDED = "needed_option"


def told(kind: str, text: str, loc: Any = ()) -> dict[str, Any]:
    """A mistake as Pydantic takes it."""
    return {"type": PydanticCustomError(kind, "{text}", {"text": text}), "loc": loc, "input": None}


def located(make: Callable[..., Any], *arguments: Any) -> Any:
    """`make(*arguments)`; its SetupError is a mistake at the value that is validated."""
    try:
        return make(*arguments)
    except SetupError as error:
        raise PydanticCustomError("setup", "{text}", {"text": str(error)}) from None


_FIRST_NAME = re.compile(r"(?:[A-Z]\w*'s )?'?(\w+)")


def first_name(text: str) -> str | None:
    """The option that the text of an error begins with, if it begins with one."""
    found = _FIRST_NAME.match(text)
    return found[1] if found else None


# Types of single values.


def _length(value: Any) -> Any:
    located(parse_duration, value)
    return value


def _key(value: Any) -> Any:
    return value if isinstance(value, bool) else _header(value)


def _header(value: Any) -> Any:
    if isinstance(value, dict) and value.keys() == {"header"}:
        return located(Header, value["header"])
    text = must_be("a mapping with the key 'header'", value)
    raise PydanticCustomError("header", "{text}", {"text": text})


def _ack_policy(value: Any) -> Any:
    return AckPolicy[value.upper()]


def _forward_to(value: Any) -> Any:
    return DESTINATION if value == TO_DESTINATION else value


def _error_classes(value: Any) -> Any:
    names = value if isinstance(value, list) else [value]
    return tuple(located(_error_class, name) for name in names)


def _error_class(name: Any) -> Any:
    if isinstance(name, str) and ":" not in name:
        found = getattr(builtins, name, None)
        if not isinstance(found, type) or not issubclass(found, BaseException):
            raise SetupError(f"{name!r} is no exception of Python: others are written module:name")
        return found
    if not isinstance(name, str):
        raise SetupError("it is the name of an exception, or a list of names")
    return imported(name, what="the exception")


TO_DESTINATION = "DESTINATION"
"""As `forward_to`: what `DESTINATION` is in Python."""
_TEXTS: dict[str, Any] = {
    "anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]
}
_HEADER: dict[str, Any] = {
    "type": "object",
    "properties": {"header": {"type": "string"}},
    "required": ["header"],
    "additionalProperties": False,
}
Length = Annotated[
    Any, AfterValidator(_length), WithJsonSchema({"type": ["string", "number"], "examples": ["5m"]})
]
HeaderField = Annotated[Any, AfterValidator(_header), WithJsonSchema(_HEADER)]
KeyField = Annotated[
    Any, AfterValidator(_key), WithJsonSchema({"anyOf": [{"type": "boolean"}, _HEADER]})
]
ErrorNames = Annotated[Any, AfterValidator(_error_classes), WithJsonSchema(_TEXTS)]
_ACK_POLICIES = tuple(policy.name.lower() for policy in AckPolicy)
AckPolicyField = Annotated[Literal[_ACK_POLICIES], AfterValidator(_ack_policy)]  # type: ignore[valid-type]
ForwardTo = Annotated[str, AfterValidator(_forward_to)]

_UNIONS = (
    ({float, timedelta, str}, Length),
    ({bool, Header}, KeyField),
    ({Header}, HeaderField),
    ({str, Destination}, ForwardTo),
    ({time}, None),
    ({URL}, None),
)
"""Members of a union that one field stands for; None: text among the others does."""


def field_type(hint: Any, known: Mapping[Any, Any]) -> Any:
    """The type of a field for an option of the type `hint`; `known` has those of objects.

    Raises:
        TypeError: a file has no form for it.
    """
    if hint in known:
        return known[hint]
    if hint in {bool, int, float, str, Any, NoneType} or get_origin(hint) is Literal:
        return hint
    if hint is AckPolicy:
        return AckPolicyField
    origin = get_origin(hint)
    arguments = get_args(hint)
    if origin in {Union, UnionType}:
        return _union(set(arguments), known)
    if origin in {Sequence, Iterable, list}:
        return list[field_type(arguments[0], known)]  # type: ignore[misc]
    if origin in {Mapping, dict}:
        return dict[str, field_type(arguments[1], known)]  # type: ignore[misc]
    raise TypeError(f"a file of YAML has no form for options of the type {hint}")


def _union(members: set[Any], known: Mapping[Any, Any]) -> Any:
    if any(get_origin(each) is type for each in members):
        return ErrorNames | None if NoneType in members else ErrorNames
    found: list[Any] = []
    for taken, kind in _UNIONS:
        if taken <= members:
            members = members - taken
            found += [] if kind is None else [kind]
    # Sorted: the JSON Schema is the same each time.
    found += [field_type(each, known) for each in sorted(members - {NoneType}, key=str)]
    found += [NoneType] * (NoneType in members)
    return Union[tuple(found)]  # noqa: UP007 - of a list


# Models.


def derived(
    name: str,
    options: Iterable[Option],
    *,
    base: type[Section] = Section,
    known: Mapping[Any, Any] | None = None,
    hidden: Sequence[str] = (),
) -> type[Any]:
    """A section with a field for each option.

    Args:
        name: Of the model.
        options: What is declared.
        base: The class to derive from; it may have fields of its own.
        known: Types of fields, by types of options.
        hidden: Options that the model's text does not show.
    """
    fields: dict[str, Any] = {}
    for option in options:
        # A factory, so that the JSON Schema does not tell null as the default.
        default: Any = {} if option.needed else {"default_factory": NoneType}
        field = Field(
            **default,
            alias=option.name,
            description=option.meaning,
            repr=option.name not in hidden,
        )
        # Pydantic's models have names of their own, such as `schema` and `copy`.
        fields[f"option_{option.name}"] = (field_type(option.hint, known or {}), field)
    return create_model(name, __base__=base, **fields)


def built(model: type[Any], make: Callable[..., Any], *, short: str | None = None) -> Any:
    """The type of a field whose value is `make(**options)`.

    Args:
        model: The options.
        make: What is made of them.
        short: The option that a value stands for that is no mapping.
    """

    def whole(value: Any) -> Any:
        return value if short is None or isinstance(value, dict) else {short: value}

    def done(section: Section) -> Any:
        try:
            return make(**section.given())
        except SetupError as error:
            text = str(error)
            loc = tuple(name for name in section.option_names() if name == first_name(text))
            details: Any = [told("setup", text, loc)]
            raise ValidationError.from_exception_data(model.__name__, details) from None

    kind: Any = Annotated[model, BeforeValidator(whole), AfterValidator(done)]
    return kind if short is None else Annotated[kind, _OrOneValue()]


class _OrOneValue:
    """In a JSON Schema: the mapping, or one value."""

    def __get_pydantic_json_schema__(self, schema: Any, handler: Any) -> dict[str, Any]:
        return {"anyOf": [handler(schema), {"type": ["string", "number"]}]}


def choice(name: str, kinds: Mapping[str, Any], meanings: Mapping[str, str]) -> Any:
    """The type of a field with exactly one of several keys; its value is that of the key."""
    fields: dict[str, Any] = {
        f"option_{key}": (
            kind,
            Field(default_factory=NoneType, alias=key, description=meanings.get(key)),
        )
        for key, kind in kinds.items()
    }
    model = create_model(
        name,
        __base__=_OneOf,
        __cls_kwargs__={"json_schema_extra": {"minProperties": 1, "maxProperties": 1}},
        **fields,
    )

    def only(section: Section) -> Any:
        return next(iter(section.given().values()))

    made: Any = Annotated[model, AfterValidator(only)]
    return made


class _OneOf(Section):
    """A mapping with one key."""

    @model_validator(mode="after")
    def _one(self) -> Any:
        if len(self.model_fields_set) != 1:
            text = f"exactly one of {', '.join(self.option_names())} is needed"
            raise PydanticCustomError("one_of", "{text}", {"text": text})
        return self
