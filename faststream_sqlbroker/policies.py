"""The scheduling policies, which `faststream_sqlbroker` has as well."""

from faststream_sqlbroker.core.policies import (
    BlockingWait,
    Concurrency,
    Debounce,
    Delay,
    Header,
    KeepLast,
    Once,
    Throttle,
    Window,
)

__all__ = (
    "BlockingWait",
    "Concurrency",
    "Debounce",
    "Delay",
    "Header",
    "KeepLast",
    "Once",
    "Throttle",
    "Window",
)
