"""Call the handler with its arguments: FastDepends' work, with all look-ups made in advance."""

from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import AsyncExitStack
from typing import Any

from fast_depends.core import CallModel
from fast_depends.utils import is_coroutine_callable

from faststream_sqlbroker.subscriber.invalid_body import is_faststream_call
from faststream_sqlbroker.subscriber.pipeline.bodies import NOT_DECODED, Load, is_decode_replaced
from faststream_sqlbroker.subscriber.pipeline.context import get_local_repository, get_variable
from faststream_sqlbroker.subscriber.pipeline.dependencies import Dependencies, ResolvedDependencies
from faststream_sqlbroker.subscriber.pipeline.dependency_models import (
    CONTEXT,
    RESERVED,
    Arguments,
    Values,
    is_any_object,
    is_unvalidated,
)
from faststream_sqlbroker.subscriber.pipeline.fingerprints import NotCompiled

HandlerCall = Callable[[Any], Awaitable[Any]]
"""Decodes the body of a message and calls the handler; returns its validated result."""


def compile_call(
    item: Any, injection: Any, load: Load, dependencies: ResolvedDependencies
) -> HandlerCall:
    """Return a function that calls the handler of `item`.

    FastDepends is the library that builds a handler's arguments. The function does the same work in
    less time.

    Args:
        item: FastStream's item, with the handler and its parameters.
        injection: FastStream's configuration of FastDepends.
        load: Decodes bodies.
        dependencies: Receives the dependencies that were looked up.

    Raises:
        NotCompiled: only FastDepends can call the handler.
    """
    model: CallModel | None = item.dependant
    if model is None or not injection.use_fastdepends or injection.get_dependent:
        raise NotCompiled("FastDepends does not build its arguments")
    if not is_faststream_call(item.handler._wrapped_call):
        raise NotCompiled("its call is replaced")
    if model.is_generator or not is_coroutine_callable(model.call):
        raise NotCompiled("it is a generator")
    arguments = Arguments(model)
    solved_dependencies = Dependencies(model, dependencies)
    if not solved_dependencies and (
        quick := _compile_unchecked(model, arguments, injection.context, load)
    ):
        return quick
    body_parameter = _find_body_parameter(model, dependencies)
    solved_call = _SolvedCall(
        item.handler, model, arguments, solved_dependencies, injection.context, body_parameter, load
    )
    return solved_call.call_compiled


def _list_names(items: Iterable[Any]) -> list[str]:
    return [item.field_name for item in items]


def _find_body_parameter(model: CallModel, dependencies: ResolvedDependencies) -> str | None:
    """Return the parameter that receives the body.

    Return None if there is no such parameter, or if each parameter receives one value of the body:
    a handler of several parameters takes a JSON object with their names.
    """
    own_names = _list_names(model.params)
    flat_names = _list_names(model.flat_params)
    if len(flat_names) > 1:
        return None
    # Flat parameters include those of dependencies.
    if flat_names and (own_names != flat_names or own_names != list(model.positional_args)):
        raise NotCompiled("the body goes to a dependency, or to a keyword-only parameter")
    if own_names:
        return own_names[0]
    # FastDepends passes the body to the first parameter, which the context then overwrites.
    other_names = [name for name in model.keyword_args if name not in model.dependencies]
    if not other_names and _has_nested(dependencies):
        raise NotCompiled("nested dependencies, and no parameter takes the body")
    return other_names[0] if other_names else None


def _has_nested(dependencies: ResolvedDependencies) -> bool:
    return any(model.dependencies for _, model in dependencies)


class _SolvedCall:
    """Calls a handler that takes dependencies, context values or validated arguments."""

    def __init__(
        self,
        handler: Any,
        model: CallModel,
        arguments: Arguments,
        dependencies: Dependencies,
        context: Any,
        body_parameter: str | None,
        load: Load,
    ) -> None:
        """Store the parts of the call.

        `body_parameter` is the parameter that receives the body. A handler of several parameters
        has none: each receives one value of the body, which is then spread.
        """
        self._handler = handler
        self._provider = model.dependency_provider
        self._arguments = arguments
        self._dependencies = dependencies
        self._context = context
        self._body_parameter = body_parameter
        self._is_spread = len(model.flat_params) > 1
        self._load = load

    async def call_compiled(self, message: Any) -> Any:
        """Decode the body, build the arguments and call the handler.

        Rare cases, such as overridden dependencies or an unsuitable body, are left to FastDepends,
        which then behaves and fails as documented. Errors of the body are recognized by the name of
        this method in the traceback.
        """
        # Overrides exist only during a test, so FastDepends applies them.
        if self._dependencies and self._provider.overrides:
            return await self._handler._wrapped_call(message)
        body = self._load(message)
        if body is NOT_DECODED:
            # FastDepends decodes the body again, which a method of the user's may not expect.
            if self._is_spread and is_decode_replaced(message):
                return await self._handler._wrapped_call(message)
            body = await message.decode()
        values: Values = {CONTEXT: self._context}
        if self._is_spread:
            # Let FastDepends raise its own error for such a body.
            if not _is_argument_mapping(body):
                return await self._handler._wrapped_call(message)
            values.update(body)
        elif self._body_parameter is not None:
            values[self._body_parameter] = body
        if not self._dependencies.needs_stack:
            return await self._call(values, None)
        async with AsyncExitStack() as stack:
            return await self._call(values, stack)
        # A dependency has suppressed the handler's error. As in FastDepends that is a failure: the
        # message must not count as handled.
        raise AssertionError("unreachable")

    async def _call(self, values: Values, stack: AsyncExitStack | None) -> Any:
        """Solve the dependencies, validate the arguments, call the handler and check the result.

        To solve a dependency is to call its function. `stack` closes dependencies that are context
        managers; None if there are none.
        """
        arguments = self._arguments
        if self._dependencies:
            await self._dependencies.add(values, stack, {})
        result = await arguments.call(**arguments.build(values))
        return result if arguments.respond is None else arguments.respond(result)


def _is_argument_mapping(body: Any) -> bool:
    """Return True if each value of `body` may be an argument of the handler.

    A decoder may return keys that are not text. Names of FastDepends' own parameters are not
    allowed either.
    """
    return (
        isinstance(body, Mapping)
        and RESERVED.isdisjoint(body)
        and all(isinstance(name, str) for name in body)
    )


def _compile_unchecked(
    model: CallModel, arguments: Arguments, context: Any, load: Load
) -> HandlerCall | None:
    """Compile the fastest call, for a handler that takes the unchanged body or any JSON object.

    The handler may also take the message. No argument of such a handler needs validation. Return
    None for other handlers.
    """
    own_names = _list_names(model.params)
    if len(own_names) != 1 or own_names != list(model.positional_args):
        return None
    [body_parameter] = own_names
    copies = is_any_object(model, body_parameter)
    names = [name for name, source, _ in arguments.fields if source == "message"]
    if len(names) != len(arguments.fields):
        return None
    unchecked = names if copies else [body_parameter, *names]
    if not all(is_unvalidated(model, name) for name in unchecked):
        return None
    return _make_unchecked_call(arguments, body_parameter, names, context, load, copies=copies)


def _make_unchecked_call(
    arguments: Arguments,
    body_parameter: str,
    names: list[str],
    context: Any,
    load: Load,
    *,
    copies: bool,
) -> HandlerCall:
    """Return a call that passes the body without validation, with the message if requested.

    `copies` is True for a body annotated as dict, of which Pydantic would only make a copy. `names`
    are the parameters that receive the message. The message is read from its context variable.
    """
    call = arguments.call
    respond = arguments.respond
    repository = get_local_repository(context)
    variable = get_variable(repository, "message")

    async def call_compiled(message: Any) -> Any:
        """Decode the body of `message`, and call the handler with the body or a copy."""
        body = load(message)
        # The result of another decoder may have keys that are not text, and is not a JSON object.
        is_object = body.__class__ is dict
        if body is NOT_DECODED:
            body = await message.decode()
        # A global value of this name takes precedence over the message.
        is_hidden = names and "message" in repository._global_context
        if is_hidden or (copies and not is_object):
            result = await call(**arguments.build({CONTEXT: context, body_parameter: body}))
        else:
            call_arguments = {body_parameter: body.copy() if copies else body}
            for name in names:
                # A middleware may have passed on another message.
                call_arguments[name] = variable.get()
            result = await call(**call_arguments)
        return result if respond is None else respond(result)

    return call_compiled
