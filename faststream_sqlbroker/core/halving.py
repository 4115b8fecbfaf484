"""Write a batch in smaller parts where the database refuses the whole, so that each culprit is
found.
"""

from collections.abc import Awaitable, Callable, Iterable
from typing import TypeVar

from faststream_sqlbroker.exceptions import StoreError, TransientStoreError

Part = TypeVar("Part")


async def write_in_halves(
    part: Part,
    write: Callable[[Part], Awaitable[None]],
    split: Callable[[Part, StoreError], Iterable[Part]],
) -> None:
    """Write `part`, or the smaller parts that `split` makes after the database has refused.

    `split` gives nothing for a culprit that it deals with itself.

    Raises:
        TransientStoreError: what was not written until now is not known to be written.
        StoreError: `split` has raised it.
    """
    try:
        await write(part)
    except TransientStoreError:
        raise
    except StoreError as error:
        for smaller in split(part, error):
            await write_in_halves(smaller, write, split)
