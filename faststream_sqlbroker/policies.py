"""The scheduling policies, also available from `faststream_sqlbroker`."""

from faststream_sqlbroker.core.policies import *  # noqa: F403 - an alias
