"""The archive and the live table in Spark: `pip install "sqlbroker[spark]"`.

The names are those of `pyspark_sqlbroker`, which imports Spark when a name is first used.
"""

from typing import TYPE_CHECKING, Any

import pyspark_sqlbroker

if TYPE_CHECKING:
    from pyspark_sqlbroker import *  # noqa: F403

__all__ = pyspark_sqlbroker.__all__


def __getattr__(name: str) -> Any:
    """Get the name from `pyspark_sqlbroker`.

    Raises:
        MissingExtraError: a package of the extra is not installed.
    """
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(pyspark_sqlbroker, name)
