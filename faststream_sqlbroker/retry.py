"""The retry strategies, which `faststream_sqlbroker` has as well."""

from faststream_sqlbroker.core.retry import *  # noqa: F403 - under another name
