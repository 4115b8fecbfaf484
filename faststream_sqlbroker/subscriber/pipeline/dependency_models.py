"""Build the arguments of a function, a handler or a dependency, like FastDepends does."""

from collections.abc import Callable
from typing import Any

from fast_depends.core import CallModel
from fast_depends.library.serializer import Serializer
from fast_depends.pydantic.serializer import (
    _PydanticSerializer,
    _PydanticSerializerWithResponse,
)

from faststream_sqlbroker.adapter.pipeline import Context, resolve_context_by_name
from faststream_sqlbroker.adapter.values import EMPTY
from faststream_sqlbroker.subscriber.invalid_body import raise_invalid
from faststream_sqlbroker.subscriber.pipeline.fingerprints import NotCompiled


class AsyncContext(Context):
    """A Context whose `use` is a coroutine.

    FastStream runs a plain `use` in a thread, once per parameter, which is slower.
    """

    async def use(self, /, **kwargs: Any) -> Any:  # type: ignore[override]
        """Resolve the value, like `Context.use`."""
        return super().use(**kwargs)


CONTEXT = "context__"
"""The argument by which FastDepends passes FastStream's context."""
RESERVED = frozenset(
    {CONTEXT, "func", "call", "stack", "cache_dependencies", "nested", "dependency_provider"}
)
"""Names of the parameters of FastDepends' own functions; arguments with these names fail."""

Values = dict[str, Any]
Validate = Callable[[Values], Values]
Field = tuple[str, str, Any]
"""A parameter, its name in the context, and its default."""

_PLAIN = (_PydanticSerializer, _PydanticSerializerWithResponse)


class Arguments:
    """Builds the arguments of a function from values by name."""

    __slots__ = ("_fields", "_names", "_serializer", "_validate", "call", "respond")

    def __init__(self, model: CallModel) -> None:
        """Read the parameters of `model`.

        Raises:
            NotCompiled: only FastDepends can build one of the parameters.
        """
        if model.args_name or model.kwargs_name:
            raise NotCompiled("*args or **kwargs")
        names = (*model.keyword_args, *model.positional_args)
        if not RESERVED.isdisjoint(names):
            raise NotCompiled("a parameter with a name that FastDepends reserves")
        self.call = model.call
        self._names = names
        self._fields = get_context_fields(model)
        self._serializer = model.serializer
        self._validate = _get_validator(model.serializer)
        self.respond = _get_result_validator(model)
        """Validates the result of the function; None if any result is valid."""

    @property
    def fields(self) -> tuple[Field, ...]:
        """The parameters that come from the context."""
        return self._fields

    def build(self, values: Values) -> Values:
        """Build the arguments; `values` is modified.

        `values` has the body, the context and the results of dependencies, by parameter. An error
        of the validation is raised in `raise_invalid`, by which it is recognized later.

        Raises:
            Exception: `values` do not fit the parameters.
        """
        if self._fields:
            fill_context_fields(self._fields, values)
        serializer = self._serializer
        if serializer is None:
            return {name: values[name] for name in self._names if name in values}
        try:
            if self._validate is not None:
                validated: Values = self._validate(values).__dict__
                return validated
            values.update(serializer(values))
        except Exception as error:  # noqa: BLE001 - raised again
            raise_invalid(error, serializer)
        return {name: values[name] for name in self._names if name in values}


def fill_context_fields(fields: tuple[Field, ...], values: Values) -> None:
    """Add the values from the context, like `Context.use`, but without a thread for each.

    A value that is missing in the context is also removed from `values`, so that the parameter
    keeps its default or fails.
    """
    context = values[CONTEXT]
    for parameter, name, default in fields:
        value = resolve_context_by_name(name, default, None, context)
        if EMPTY != value:  # noqa: SIM300 - as FastStream compares them
            values[parameter] = value
        else:
            values.pop(parameter, None)


def get_context_fields(model: CallModel) -> tuple[Field, ...]:
    """Return the parameters that come from the context.

    FastStream's context is a store of values by name, such as the current message or the logger.

    Raises:
        NotCompiled: one of them is not a plain `Context`.
    """
    fields = []
    custom: Any
    for parameter, custom in model.custom_fields.items():
        if type(custom) not in (Context, AsyncContext) or custom.field:
            raise NotCompiled(f"a {type(custom).__name__} for {parameter!r}")
        if custom.initial is not None:
            raise NotCompiled(f"Context(initial=...) for {parameter!r}")
        name = f"{custom.prefix}{custom.name or custom.param_name}"
        fields.append((parameter, name, custom.default))
    return tuple(fields)


def _get_validator(serializer: Serializer | None) -> Callable[[Values], Any] | None:
    """Return Pydantic's own validation, if `serializer` does nothing else, otherwise None.

    FastDepends' serializer validates arguments by a Pydantic model, with work of its own for
    special cases. The result of the validation has the arguments in its `__dict__`.
    """
    if type(serializer) not in _PLAIN:
        return None
    fields = serializer.model.__pydantic_fields__  # type: ignore[union-attr]
    plain_config = dict(serializer.config) == {"arbitrary_types_allowed": True}  # type: ignore[union-attr]
    # An alias renames a parameter, which only the serializer handles.
    renamed = any(field.alias or field.validation_alias for field in fields.values())
    if not plain_config or renamed or list(fields) != list(serializer.options):  # type: ignore[union-attr]
        return None
    validate: Callable[[Values], Any] = serializer.model.__pydantic_validator__.validate_python  # type: ignore[union-attr]
    return validate


def _get_result_validator(model: CallModel) -> Callable[[Any], Any] | None:
    """Return the function that validates the result; None if every result is valid.

    A function that is annotated to return None needs no validation of None itself.
    """
    serializer = model.serializer
    if serializer is None or model.is_generator:
        return None
    if type(serializer).response is Serializer.response:
        return None
    if serializer.response_option["return"].field_type is None and type(serializer) in _PLAIN:
        return lambda value: None if value is None else serializer.response(value)
    return serializer.response


def is_unvalidated(model: CallModel, name: str) -> bool:
    """Return True if the parameter receives any value unchanged, so validation may be skipped."""
    field = _get_field(model, name)
    return field is not None and field.annotation is Any


def is_any_object(model: CallModel, name: str) -> bool:
    """Return True if the parameter accepts any JSON object, of which Pydantic only makes a copy."""
    field = _get_field(model, name)
    return field is not None and field.annotation in (dict, dict[str, Any])


def _get_field(model: CallModel, name: str) -> Any:
    """Return Pydantic's required field `name`, or None for a field with constraints or a default.

    None, too, if the model has another serializer, which may validate differently.
    """
    if _get_validator(model.serializer) is None:
        return None
    field = model.serializer.model.__pydantic_fields__[name]  # type: ignore[union-attr]
    return field if field.is_required() and not field.metadata else None
