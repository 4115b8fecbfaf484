"""Resolve the values of `Depends` as FastDepends does, with all look-ups made in advance."""

from collections.abc import Awaitable, Callable, Hashable
from contextlib import AsyncExitStack
from typing import Any

from fast_depends.core import CallModel
from fast_depends.utils import is_coroutine_callable, solve_generator_async

from faststream_sqlbroker.flow.threads import run_in_tracked_thread
from faststream_sqlbroker.subscriber.pipeline.dependency_models import RESERVED, Arguments, Values
from faststream_sqlbroker.subscriber.pipeline.fingerprints import NotCompiled

Cache = dict[Any, Any]
ResolvedDependencies = list[tuple[Hashable, CallModel]]
"""Keys looked up in FastDepends' provider, with the results."""


class Dependencies:
    """The dependencies of a function, in the order of FastDepends' calls."""

    __slots__ = ("_extra", "_named", "needs_stack")

    def __init__(self, model: CallModel, resolved: ResolvedDependencies) -> None:
        """Look up the dependencies of `model`, and add the results to `resolved`.

        Raises:
            NotCompiled: only FastDepends can call one of the dependencies.
        """
        self._extra = [_Dependency(key, model, resolved) for key in model.extra_dependencies]
        self._named = [
            (name, _Dependency(key, model, resolved)) for name, key in model.dependencies.items()
        ]
        if not RESERVED.isdisjoint(model.dependencies):
            raise NotCompiled("a dependency with a name that FastDepends reserves")
        dependencies = (*self._extra, *(dependency for _, dependency in self._named))
        self.needs_stack: bool = any(dependency.needs_stack for dependency in dependencies)
        """True if a dependency is a generator, which is closed after the handler."""

    def __bool__(self) -> bool:
        return bool(self._extra or self._named)

    async def add(self, values: Values, stack: AsyncExitStack | None, cache: Cache) -> None:
        """Add the results of the dependencies to `values`.

        Extra dependencies belong to no parameter, so their results are dropped. `stack` closes
        generators after the handler; `cache` has the results for this message.
        """
        for dependency in self._extra:
            await dependency.solve(values, stack, cache)
        for name, dependency in self._named:
            if name not in values:
                values[name] = await dependency.solve(values, stack, cache)


class _Dependency:
    """Look up the dependency `key` of `parent`, with the dependencies of its own."""

    __slots__ = ("_arguments", "_inner", "_is_generator", "_run", "_use_cache", "needs_stack")

    def __init__(self, key: Hashable, parent: CallModel, resolved: ResolvedDependencies) -> None:
        model = parent.dependency_provider.get_dependant(key)
        resolved.append((key, model))
        self._arguments = Arguments(model)
        self._inner = Dependencies(model, resolved)
        self._is_generator = model.is_generator
        self._use_cache = model.use_cache
        self._run: Callable[..., Awaitable[Any]] | None = None
        if is_coroutine_callable(model.call):
            self._run = model.call
        self.needs_stack = self._is_generator or self._inner.needs_stack

    async def solve(self, parent_values: Values, stack: AsyncExitStack | None, cache: Cache) -> Any:
        """Return the value of the dependency, from `cache` if already called.

        `parent_values` are the values by name of the function that needs the dependency. They are
        copied, because a parameter of the same name may get another value here.
        """
        arguments = self._arguments
        call = arguments.call
        # Cache by function, as FastDepends does: a dependency of two parameters runs once per
        # message.
        if self._use_cache and call in cache:
            return cache[call]
        values = parent_values.copy()
        if self._inner:
            await self._inner.add(values, stack, cache)
        call_arguments = arguments.build(values)
        value: Any
        if self._is_generator:
            value = await solve_generator_async(call=call, stack=stack, **call_arguments)  # type: ignore[arg-type]
        else:
            run = self._run
            value = await (
                run_in_tracked_thread(call, **call_arguments)
                if run is None
                else run(**call_arguments)
            )
            if arguments.respond is not None:
                value = arguments.respond(value)
        if self._use_cache:
            cache[call] = value
        return value
