"""Write a batch in smaller parts if the database refuses it, so that each culprit is found."""

from collections.abc import Awaitable, Callable, Iterable
from typing import TypeVar

from faststream_sqlbroker.exceptions import StoreError, TransientStoreError

Part = TypeVar("Part")


async def write_in_halves(
    part: Part,
    write: Callable[[Part], Awaitable[None]],
    split: Callable[[Part, StoreError], Iterable[Part]],
) -> None:
    """Write `part`, or the smaller parts made by `split` if the database refuses `part`.

    A culprit is a message that the database refuses even alone. `split` handles it itself, and
    returns nothing for it.

    Raises:
        TransientStoreError: parts that were not written before may or may not be written.
        StoreError: `split` has raised it.
    """
    try:
        await write(part)
    except TransientStoreError:
        raise
    except StoreError as error:
        for smaller in split(part, error):
            await write_in_halves(smaller, write, split)
