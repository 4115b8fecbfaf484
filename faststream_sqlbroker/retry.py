"""The retry strategies, also available from `faststream_sqlbroker`."""

from faststream_sqlbroker.core.retry import *  # noqa: F403 - under another name
