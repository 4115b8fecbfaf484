"""Requirements of transactional=True on handlers and on the engine's pool."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, get_args, get_type_hints

from faststream_sqlbroker.exceptions import SetupError
from faststream_sqlbroker.handler_calls import is_synchronous

if TYPE_CHECKING:
    from faststream_sqlbroker.database.store import Store

TRANSACTION = "sql_transaction"
"""Name in FastStream's context of the handler's transaction."""


def check_transaction(
    handlers: Sequence[Callable[..., Any]], store: "Store", *, transactional: bool
) -> None:
    """Refuse handlers and pools that cannot work with the option `transactional`.

    With transactional=True each message has a transaction, which commits the handler's changes
    together with the ack and takes a connection for that time.

    Raises:
        SetupError: a synchronous handler or a pool too small for transactional=True, or a handler
            that requests a transaction without this option.
    """
    for handler in handlers:
        name = getattr(handler, "__name__", repr(handler))
        if transactional and is_synchronous(handler):
            msg = (
                "transactional=True passes an asynchronous connection, which the synchronous "
                f"handler {name!r} cannot use: make the handler async"
            )
            raise SetupError(msg)
        if not transactional and (parameter := _find_transaction_parameter(handler)):
            msg = (
                f"the handler {name!r} takes the transaction of its message ({parameter!r}), but "
                "its subscriber opens none: add transactional=True to the subscriber"
            )
            raise SetupError(msg)
    if transactional and store.handler_slots < 1:
        msg = (
            "transactional=True needs a connection for each running handler, but the engine's pool "
            "has none left for handlers: raise pool_size or max_overflow"
        )
        raise SetupError(msg)


def _find_transaction_parameter(handler: Callable[..., Any]) -> str | None:
    """Return the parameter that requests the transaction's connection or session, or None.

    Such a parameter is annotated with FastStream's Context of the name `TRANSACTION` or an
    attribute of it, as SqlConnection is.
    """
    try:
        hints = get_type_hints(handler, include_extras=True)
    except (NameError, TypeError):
        # Only FastStream can resolve some names. A missing transaction then fails at the first
        # message.
        return None
    for parameter, hint in hints.items():
        names = [str(getattr(extra, "name", "")) for extra in get_args(hint)[1:]]
        if any(name.partition(".")[0] == TRANSACTION for name in names):
            return parameter
    return None
