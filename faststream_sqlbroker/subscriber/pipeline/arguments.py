"""Calls the handler with what it asks for: FastDepends' work, with all answers found before."""

from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import AsyncExitStack
from typing import Any

from fast_depends.core import CallModel
from fast_depends.utils import is_coroutine_callable

from faststream_sqlbroker.subscriber.invalid_body import is_faststreams_call
from faststream_sqlbroker.subscriber.pipeline.bodies import UNKNOWN, Load, decodes_by_itself
from faststream_sqlbroker.subscriber.pipeline.context import local_repository, variable_of
from faststream_sqlbroker.subscriber.pipeline.dependencies import Dependencies, Found
from faststream_sqlbroker.subscriber.pipeline.fingerprints import NotCompiled
from faststream_sqlbroker.subscriber.pipeline.models import (
    CONTEXT,
    RESERVED,
    Arguments,
    Values,
    takes_any_object,
    takes_anything,
)

Call = Callable[[Any], Awaitable[Any]]
"""Decodes the body of a message and calls the handler; its checked result."""


def compile_call(item: Any, injection: Any, load: Load, found: Found) -> Call:
    """How to call the handler of `item`.

    Args:
        item: FastStream's, with the handler and what it asks for.
        injection: FastStream's configuration of FastDepends.
        load: Decodes bodies.
        found: Gets the dependencies that were looked up.

    Raises:
        NotCompiled: only FastDepends knows.
    """
    model: CallModel | None = item.dependant
    if model is None or not injection.use_fastdepends or injection.get_dependent:
        raise NotCompiled("its arguments are not FastDepends'")
    if not is_faststreams_call(item.handler._wrapped_call):
        raise NotCompiled("its call is replaced")
    if model.is_generator or not is_coroutine_callable(model.call):
        raise NotCompiled("it is a generator")
    arguments = Arguments(model)
    dependencies = Dependencies(model, found)
    if not dependencies and (quick := _unchecked(model, arguments, injection.context, load)):
        return quick
    place = _body_place(model, found)
    solved = _Solved(item.handler, model, arguments, dependencies, injection.context, place, load)
    return solved.call_compiled


def _names(items: Iterable[Any]) -> list[str]:
    return [item.field_name for item in items]


def _body_place(model: CallModel, found: Found) -> str | None:
    """The parameter that takes the body; None: no parameter, or each takes one of its values."""
    own = _names(model.params)
    flat = _names(model.flat_params)
    if len(flat) > 1:
        return None
    if flat and (own != flat or own != list(model.positional_args)):
        raise NotCompiled("the body goes to a dependency, or to a keyword-only parameter")
    if own:
        return own[0]
    # FastDepends gives it to the first parameter, which the context then replaces.
    others = [name for name in model.keyword_args if name not in model.dependencies]
    if not others and _are_nested(found):
        raise NotCompiled("dependencies of dependencies, and no parameter takes the body")
    return others[0] if others else None


def _are_nested(found: Found) -> bool:
    return any(model.dependencies for _, model in found)


class _Solved:
    """Calls one handler with everything that it may ask for."""

    def __init__(
        self,
        handler: Any,
        model: CallModel,
        arguments: Arguments,
        dependencies: Dependencies,
        context: Any,
        place: str | None,
        load: Load,
    ) -> None:
        self._handler = handler
        self._provider = model.dependency_provider
        self._arguments = arguments
        self._dependencies = dependencies
        self._context = context
        self._place = place
        self._is_spread = len(model.flat_params) > 1
        self._load = load

    async def call_compiled(self, message: Any) -> Any:
        # Overrides last for a test: FastDepends applies them.
        if self._dependencies and self._provider.overrides:
            return await self._handler._wrapped_call(message)
        body = self._load(message)
        if body is UNKNOWN:
            # FastDepends decodes it again, which a method of the user's may not expect.
            if self._is_spread and decodes_by_itself(message):
                return await self._handler._wrapped_call(message)
            body = await message.decode()
        values: Values = {CONTEXT: self._context}
        if self._is_spread:
            # Such a body fails in FastDepends, with FastDepends' error.
            if not _names_arguments(body):
                return await self._handler._wrapped_call(message)
            values.update(body)
        elif self._place is not None:
            values[self._place] = body
        if not self._dependencies.needs_stack:
            return await self._call(values, None)
        async with AsyncExitStack() as stack:
            return await self._call(values, stack)
        # A dependency has swallowed the handler's error. That is a failure, as in FastDepends: the
        # message must not count as handled.
        raise AssertionError("unreachable")

    async def _call(self, values: Values, stack: AsyncExitStack | None) -> Any:
        arguments = self._arguments
        if self._dependencies:
            await self._dependencies.add(values, stack, {})
        result = await arguments.call(**arguments.of(values))
        return result if arguments.respond is None else arguments.respond(result)


def _names_arguments(body: Any) -> bool:
    """Whether each value of `body` may be an argument; a decoder may give keys that are no text."""
    return (
        isinstance(body, Mapping)
        and RESERVED.isdisjoint(body)
        and all(isinstance(name, str) for name in body)
    )


def _unchecked(model: CallModel, arguments: Arguments, context: Any, load: Load) -> Call | None:
    """The quickest way, for a handler that takes the body as it is, or as any JSON object.

    It may ask for the message, too.
    """
    own = _names(model.params)
    if len(own) != 1 or own != list(model.positional_args):
        return None
    [place] = own
    copies = takes_any_object(model, place)
    names = [name for name, of, _ in arguments.fields if of == "message"]
    if len(names) != len(arguments.fields):
        return None
    unchecked = names if copies else [place, *names]
    if not all(takes_anything(model, name) for name in unchecked):
        return None
    return _with_message(arguments, place, names, context, load, copies=copies)


def _with_message(
    arguments: Arguments, place: str, names: list[str], context: Any, load: Load, *, copies: bool
) -> Call:
    """Of the context the handler asks for the message at most."""
    call = arguments.call
    respond = arguments.respond
    repository = local_repository(context)
    variable = variable_of(repository, "message")

    async def call_compiled(message: Any) -> Any:
        body = load(message)
        # Another decoder's may have keys that are no text, and is no JSON object.
        is_object = body.__class__ is dict
        if body is UNKNOWN:
            body = await message.decode()
        # A global value of that name comes before the message.
        is_hidden = names and "message" in repository._global_context
        if is_hidden or (copies and not is_object):
            result = await call(**arguments.of({CONTEXT: context, place: body}))
        else:
            given = {place: body.copy() if copies else body}
            for name in names:
                given[name] = variable.get()  # a middleware may have handed another one on
            result = await call(**given)
        return result if respond is None else respond(result)

    return call_compiled
