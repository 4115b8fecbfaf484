"""The retry strategies, also available from `faststream_sqlbroker`."""

from faststream_sqlbroker.core.retry import *  # noqa: F403 - an alias
