"""Render a report's page: one file without a script; texts of messages are escaped.

Each error has the command that publishes its messages again.
"""

import hashlib
import shlex
from collections.abc import Sequence
from datetime import timedelta

from jinja2 import Environment, PackageLoader, StrictUndefined

from faststream_sqlbroker.core.text import replace_invisible
from pyspark_sqlbroker.report.figures import ReportFigures, Row
from pyspark_sqlbroker.report.plots import draw


def render_page(
    figures: ReportFigures,
    title: str,
    message_url: str | None = None,
    replay_options: Sequence[str] = (),
) -> str:
    """Render the page as HTML.

    Arguments as for `write_report`. Texts of messages are escaped, and invisible characters are
    replaced, as they could reorder or hide what is shown.
    """
    environment = Environment(
        loader=PackageLoader("pyspark_sqlbroker.report", ""),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        # HTML is marked by its class (Markup), so only plain strings are escaped.
        finalize=lambda value: replace_invisible(value) if type(value) is str else value,
    )
    environment.filters["by"] = lambda rows, column: {row[column]: row for row in rows}
    return environment.get_template("page.html").render(
        figures=figures,
        title=title,
        message_url=message_url,
        draw=lambda name: draw(name, figures),
        replay=lambda error: build_replay_command(error, figures.totals, replay_options),
        show_length=format_duration,
    )


def build_replay_command(error: Row, totals: Row, replay_options: Sequence[str]) -> str | None:
    """Build a line for a POSIX shell that shows what would be published, then asks.

    The name of the job comes from the error and the period, so that the same line publishes each
    message once, however often it runs.

    Args:
        error: A row of `top_errors`.
        totals: Totals of the period, with the first and last time.
        replay_options: More arguments of the command, which select the rows.

    Returns:
        None if a name has characters that a page cannot show.
    """
    options = [
        f"--failed-in={error['queue']}",
        f"--reason={error['reason'] or ''}",
        f"--error-type={error['error_type'] or ''}",
        f"--into={error['queue']}",
        f"--since={totals['first'].isoformat()}",
        # The last row belongs to the period.
        f"--until={(totals['last'] + timedelta(microseconds=1)).isoformat()}",
    ]
    job = f"report-{hashlib.sha256(chr(0).join(options).encode()).hexdigest()[:12]}"
    line = shlex.join(["sqlbroker", "archive", "replay", "--job", job, *options, *replay_options])
    return line if replace_invisible(line) == line else None


def format_duration(seconds: float) -> str:
    """Format a duration with three digits and a unit."""
    units = ((86_400.0, "d"), (3600.0, "h"), (60.0, "min"), (1.0, "s"), (1e-3, "ms"))
    size, unit = next(((size, unit) for size, unit in units if seconds >= size), (1e-6, "µs"))
    return f"{seconds / size:.3g} {unit}"
