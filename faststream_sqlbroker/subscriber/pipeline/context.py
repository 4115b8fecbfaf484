"""Set FastStream's context around a message: the same variables in the same order."""

from contextvars import ContextVar, Token
from typing import Any

from faststream_sqlbroker.adapter.pipeline import ContextRepo, ContextRepoComposition
from faststream_sqlbroker.adapter.values import EMPTY
from faststream_sqlbroker.subscriber.pipeline.fingerprints import NotCompiled

_ALWAYS = ("handler_", "logger")
_MESSAGE_NAMES = ("log_context", "message")

Tokens = tuple["Token[Any]", "Token[Any]", "Token[Any] | None", "list[Token[Any]]"]
MessageTokens = tuple["Token[Any]", "Token[Any]"]


def get_local_repository(context: Any) -> ContextRepo:
    """Return the repository of local values of `context`.

    FastStream's context has global values, and local values for the current message. A router's
    context contains the broker's.

    Raises:
        NotCompiled: its class is not known.
    """
    if type(context) is ContextRepo:
        return context
    if type(context) is ContextRepoComposition:
        inner: ContextRepo = context._inner_context
        return inner
    raise NotCompiled(f"the context is a {type(context).__name__}")


def get_variable(repository: ContextRepo, name: str) -> "ContextVar[Any]":
    """Return the ContextVar of `name`; create it if no message has used it yet.

    With the ContextVar at hand, a message needs no look-up by name.
    """
    variables = repository._scope_context
    if name not in variables:
        # Setting a value creates the variable; the value is reset immediately.
        repository.reset_local(name, repository.set_local(name, EMPTY))
    return variables[name]


class Scopes:
    """Enters and leaves the two context scopes of a message: general values, and the message's.

    The variables are looked up in advance, which saves time for each message.
    """

    __slots__ = (
        *("_first", "_first_value", "_handler", "_log_context", "_logger"),
        *("_message", "_others", "_repo", "_subscriber"),
    )

    def __init__(self, subscriber: Any, context: Any, extra: dict[str, Any]) -> None:
        """Set `extra` around each message of `subscriber`.

        Raises:
            NotCompiled: the context's class is not known, or `extra` replaces FastStream's names.
        """
        if not extra.keys().isdisjoint((*_ALWAYS, *_MESSAGE_NAMES)):
            raise NotCompiled("extra_context replaces names of FastStream")
        self._repo = get_local_repository(context)
        self._subscriber = subscriber
        self._handler, self._logger = (get_variable(self._repo, name) for name in _ALWAYS)
        self._log_context, self._message = (
            get_variable(self._repo, name) for name in _MESSAGE_NAMES
        )
        # Nearly always the broker is the only extra name.
        names = list(extra)
        self._first = get_variable(self._repo, names[0]) if names else None
        self._first_value = extra[names[0]] if names else None
        self._others = [(get_variable(self._repo, name), extra[name]) for name in names[1:]]

    def is_unchanged(self) -> bool:
        """Return True unless the variables were replaced, as after `clear()`."""
        return self._repo._scope_context.get("message") is self._message

    def enter(self, logger: Any) -> Tokens:
        """Set the values that do not depend on the message; pass the result to `leave`.

        They are the subscriber, the logger and the extra context, such as the broker.
        """
        first = self._first
        return (
            self._handler.set(self._subscriber),
            self._logger.set(logger),
            None if first is None else first.set(self._first_value),
            [variable.set(value) for variable, value in self._others] if self._others else [],
        )

    def enter_message(self, log_context: dict[str, str], message: Any) -> MessageTokens:
        """Set the message and its log columns; pass the result to `leave`."""
        return self._log_context.set(log_context), self._message.set(message)

    def leave(self, tokens: Tokens, message_tokens: MessageTokens | None) -> None:
        """Reset everything in reverse order."""
        if message_tokens is not None:
            log_context, message = message_tokens
            self._message.reset(message)
            self._log_context.reset(log_context)
        handler, logger, first, other_tokens = tokens
        if other_tokens:
            pairs = zip(reversed(self._others), reversed(other_tokens), strict=True)
            for (variable, _), token in pairs:
                variable.reset(token)
        if self._first is not None and first is not None:
            self._first.reset(first)
        self._logger.reset(logger)
        self._handler.reset(handler)
