"""A `Context` that needs no thread."""

from typing import Any

from faststream_sqlbroker.adapter.values import Context


class AsyncContext(Context):
    """A Context whose `use` is a coroutine.

    FastStream runs a plain `use` in a thread, once per parameter, which is slower.
    """

    async def use(self, /, **kwargs: Any) -> Any:  # type: ignore[override]
        """As Context's."""
        return super().use(**kwargs)
