"""FastStream's context around a message: the same variables, set and reset in the same order."""

from contextvars import ContextVar, Token
from typing import Any

from faststream_sqlbroker.adapter.pipeline import ContextRepo, ContextRepoComposition
from faststream_sqlbroker.adapter.values import EMPTY
from faststream_sqlbroker.subscriber.pipeline.fingerprints import NotCompiled

_ALWAYS = ("handler_", "logger")
_OF_A_MESSAGE = ("log_context", "message")

Tokens = tuple["Token[Any]", "Token[Any]", "Token[Any] | None", "list[Token[Any]]"]
MessageTokens = tuple["Token[Any]", "Token[Any]"]


def local_repository(context: Any) -> ContextRepo:
    """Where `context` keeps what is local.

    Raises:
        NotCompiled: its class is not known.
    """
    if type(context) is ContextRepo:
        return context
    if type(context) is ContextRepoComposition:
        inner: ContextRepo = context._inner_context
        return inner
    raise NotCompiled(f"the context is a {type(context).__name__}")


def variable_of(repository: ContextRepo, name: str) -> "ContextVar[Any]":
    """The variable that FastStream sets; it makes one for the first message."""
    known = repository._scope_context
    if name not in known:
        # To set it makes the variable; the value itself is undone at once.
        repository.reset_local(name, repository.set_local(name, EMPTY))
    return known[name]


class Scopes:
    """Enters and leaves the two scopes of a message."""

    __slots__ = (
        *("_first", "_first_value", "_handler", "_log_context", "_logger"),
        *("_message", "_others", "_repo", "_subscriber"),
    )

    def __init__(self, subscriber: Any, context: Any, extra: dict[str, Any]) -> None:
        """Set `extra` around each message of `subscriber`.

        Raises:
            NotCompiled: the context's class is not known, or `extra` replaces FastStream's names.
        """
        if not extra.keys().isdisjoint((*_ALWAYS, *_OF_A_MESSAGE)):
            raise NotCompiled("extra_context replaces names of FastStream")
        self._repo = local_repository(context)
        self._subscriber = subscriber
        self._handler, self._logger = (variable_of(self._repo, name) for name in _ALWAYS)
        self._log_context, self._message = (variable_of(self._repo, name) for name in _OF_A_MESSAGE)
        # Nearly always it is the broker alone.
        names = list(extra)
        self._first = variable_of(self._repo, names[0]) if names else None
        self._first_value = extra[names[0]] if names else None
        self._others = [(variable_of(self._repo, name), extra[name]) for name in names[1:]]

    def holds(self) -> bool:
        """Whether the variables are the ones that FastStream would set: `clear()` forgets them."""
        return self._repo._scope_context.get("message") is self._message

    def enter(self, logger: Any) -> Tokens:
        """Set what is known before the message is; `leave` takes the result."""
        first = self._first
        return (
            self._handler.set(self._subscriber),
            self._logger.set(logger),
            None if first is None else first.set(self._first_value),
            [variable.set(value) for variable, value in self._others] if self._others else [],
        )

    def enter_message(self, log_context: dict[str, str], message: Any) -> MessageTokens:
        """Set the message; `leave` takes the result."""
        return self._log_context.set(log_context), self._message.set(message)

    def leave(self, tokens: Tokens, of_message: MessageTokens | None) -> None:
        """Reset everything, the last first."""
        if of_message is not None:
            log_context, message = of_message
            self._message.reset(message)
            self._log_context.reset(log_context)
        handler, logger, first, others = tokens
        if others:
            pairs = zip(reversed(self._others), reversed(others), strict=True)
            for (variable, _), token in pairs:
                variable.reset(token)
        if self._first is not None and first is not None:
            self._first.reset(first)
        self._logger.reset(logger)
        self._handler.reset(handler)
