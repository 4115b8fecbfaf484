"""What a statement compiles to, kept from test to test.

SQLAlchemy keeps it for each engine, and each test has an engine of its own.
"""

from functools import cache
from typing import Any, Self

from sqlalchemy.util import LRUCache


class Compiled(LRUCache[Any, Any]):
    """For the engines of one kind of database and driver: `compiled_cache` of their options.

    SQLAlchemy's keys begin with the engine's dialect. Those of one kind compile alike.
    """

    @classmethod
    @cache
    def of(cls, database: str) -> Self:
        """The one of the kind `database`, for the life of this process."""
        return cls(2000)

    def get(self, key: Any, default: Any = None) -> Any:
        """As a mapping's."""
        return super().get(key[1:], default)

    def __setitem__(self, key: Any, value: Any) -> None:
        super().__setitem__(key[1:], value)
