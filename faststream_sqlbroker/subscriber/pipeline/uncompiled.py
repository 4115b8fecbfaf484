"""Why something is left to FastStream."""


class NotCompiled(Exception):  # noqa: N818 - a reason, which never leaves this package
    """What is asked for is not known here: FastStream does it."""
