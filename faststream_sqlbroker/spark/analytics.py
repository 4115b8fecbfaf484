"""`pyspark_sqlbroker.analytics` under the name that users import."""

from pyspark_sqlbroker import analytics
from pyspark_sqlbroker.analytics import *  # noqa: F403

__all__ = analytics.__all__
