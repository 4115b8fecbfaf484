"""The only package that opens a transaction."""

from faststream_sqlbroker.store.store import Store

__all__ = ("Store",)
