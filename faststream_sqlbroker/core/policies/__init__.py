"""Scheduling policies: their options and decisions. Pure; times are numbers."""

from faststream_sqlbroker.core.policies.basic import BlockingWait, Concurrency, Delay, Once
from faststream_sqlbroker.core.policies.combinations import (
    Policy,
    check_ack_first,
    check_ordered,
    find_key_header,
    find_once,
    get_policy_key,
    validate_policies,
)
from faststream_sqlbroker.core.policies.debounce import Debounce
from faststream_sqlbroker.core.policies.header import Header
from faststream_sqlbroker.core.policies.keep_last import KeepLast
from faststream_sqlbroker.core.policies.throttle import Throttle
from faststream_sqlbroker.core.policies.window import Window

__all__ = (
    "BlockingWait",
    "Concurrency",
    "Debounce",
    "Delay",
    "Header",
    "KeepLast",
    "Once",
    "Policy",
    "Throttle",
    "Window",
    "check_ack_first",
    "check_ordered",
    "find_key_header",
    "find_once",
    "get_policy_key",
    "validate_policies",
)
