"""Words of the pages: their names, and plain ones for what is stored in a shorter form."""

from datetime import datetime, timezone

MENU = (
    ("/", "Overview", "o"),
    ("/ui/queues", "Queues", "q"),
    ("/ui/messages", "Messages", "m"),
    ("/ui/dead-letters", "Dead letters", "d"),
    ("/ui/schedules", "Schedules", "s"),
    ("/ui/policies", "Policies", "p"),
    ("/ui/locks", "Locks", "l"),
    ("/ui/workers", "Workers", "w"),
    ("/ui/channels", "Pull consumers", "c"),
    ("/ui/mirror", "Lookup", "f"),
    ("/ui/jobs", "Bulk jobs", "j"),
    ("/ui/audit", "Audit", "a"),
    ("/ui/verify", "Verify", "v"),
)
"""The pages of the menu: address, name, and the key that follows `g`."""
FOR_ADMINS = (("/ui/diagnosis", "Diagnosis", "i"),)
"""Those that only administrators may see."""
_SOME_DAY = datetime(2024, 1, 1, tzinfo=timezone.utc)


def plain_schedule(expression: str) -> str:
    """When a cron expression fires, in words; the expression itself without the extra `schedule`.

    The table may hold what another program has written, so nothing is raised.
    """
    # Without the extra, too: a dashboard must not need what only declares schedules.
    try:
        from cronsim import CronSim  # noqa: PLC0415 - an extra

        return str(CronSim(expression, _SOME_DAY).explain())
    except Exception:  # noqa: BLE001 - cronsim raises errors of several kinds for odd texts
        return expression
