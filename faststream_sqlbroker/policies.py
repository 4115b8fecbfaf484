"""The scheduling policies, which `faststream_sqlbroker` has as well."""

from faststream_sqlbroker.core.policies import *  # noqa: F403 - under another name
