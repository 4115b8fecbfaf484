"""Outcomes of messages: failures, attempts and dead letters.

And the effects of policies, expiry and lost leases.
"""

from datetime import datetime

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from faststream_sqlbroker.core.reasons import (
    DUPLICATE,
    EXPIRED,
    FAILED_ONCE,
    MAX_DELIVERIES,
    NO_KEY,
    NO_OUTCOME,
    RETRY_STRATEGY_ERROR,
    SETTLE_ERROR,
    SUPERSEDED,
    THROTTLED,
    UNKNOWN_OUTCOME,
)
from pyspark_sqlbroker.analytics.results import (
    RESULTS,
    build_outcome_counts,
    build_seconds_between,
    limit_rows,
    require_columns,
    to_result,
)
from pyspark_sqlbroker.load.decode import get_header
from pyspark_sqlbroker.moments import TimeInput, parse_time

HOUR_SECONDS = 3600
"""Seconds."""

DAY_SECONDS = 24 * HOUR_SECONDS
"""Seconds."""

OTHER_EFFECT = "other"

DISCARD_REASONS = (SUPERSEDED, DUPLICATE, EXPIRED, THROTTLED)

FAILURE_REASONS = (
    THROTTLED,
    NO_KEY,
    FAILED_ONCE,
    UNKNOWN_OUTCOME,
    MAX_DELIVERIES,
    NO_OUTCOME,
    RETRY_STRATEGY_ERROR,
    SETTLE_ERROR,
)
"""Reasons of FAILED messages that were not given by a handler."""


def retry_histogram(df: DataFrame) -> DataFrame:
    """Count messages by their number of attempts.

    Args:
        df: A frame with queue, state and attempts_count.

    Returns:
        queue STRING, attempts INT (0: it never ran), messages, completed, failed, discarded BIGINT.

    Raises:
        SetupError: columns are missing.
    """
    require_columns(df, "retry_histogram", "queue", "state", "attempts_count")
    counts = df.groupBy("queue", F.col("attempts_count").alias("attempts")).agg(
        F.count("*").alias("messages"), *build_outcome_counts()
    )
    return to_result(counts, RESULTS["retry_histogram"])


def failure_rate(df: DataFrame) -> DataFrame:
    """Return the share of failed messages of each queue.

    A message that went to a `dead_letter_queue` failed in its original queue, where it counts as
    moved; its later outcome counts for the queue that it was archived from. Messages that still
    wait in a dead letter queue are not in the archive, and not here.

    Args:
        df: A frame with queue, state and headers.

    Returns:
        queue STRING, completed, failed, discarded, moved BIGINT, rate DOUBLE ((failed + moved) /
        (completed + failed + moved), between 0 and 1; NULL where the queue has none of these).

    Raises:
        SetupError: columns are missing.
    """
    require_columns(df, "failure_rate", "queue", "state", "headers")
    moves = F.when(
        _get_origin("queue").isNotNull(),
        F.struct(_get_origin("queue").alias("queue"), F.lit("MOVED").alias("state")),
    )
    local_outcome = F.struct(F.col("queue"), F.col("state"))
    events = df.select(
        F.explode(F.array_compact(F.array(local_outcome, moves))).alias("event")
    ).select("event.*")
    counts = events.groupBy("queue").agg(
        *build_outcome_counts(), F.count_if(F.col("state") == "MOVED").alias("moved")
    )
    return to_result(counts.withColumn("rate", build_failure_rate()), RESULTS["failure_rate"])


def build_failure_rate() -> Column:
    """Return the failed share of the counts completed, failed and moved; NULL where all are 0.

    Moved messages went to a dead letter queue, and count as failed. Discarded messages, such as
    expired or cancelled ones, do not count.
    """
    failures = F.col("failed") + F.col("moved")
    ended = F.col("completed") + failures
    return F.when(ended > 0, failures / ended)


def top_errors(df: DataFrame, limit: int | None = 20) -> DataFrame:
    """Group failures by reason and class of the exception, the most frequent first.

    A failure is a FAILED message, or a message that went to a `dead_letter_queue`: the latter
    counts for its original queue, with the reason and error of that time.

    Args:
        df: A frame with id, queue, state, headers, last_error, reason and archived_at.
        limit: Maximum number of rows, over all queues; None is all.

    Returns:
        queue, reason (such as "max_attempts" or "rejected"), error_type (class of the exception,
        with its module; NULL if there was none) STRING, messages BIGINT, share DOUBLE (of all
        failures in the frame), example STRING (first line of the latest error: type and text),
        last_id BIGINT, last_at TIMESTAMP (the latest message and when it was archived). Ordered by
        the most messages, then by queue, reason and type.

    Raises:
        SetupError: columns are missing, or `limit` is no whole number above 0.
    """
    require_columns(
        df, "top_errors", "id", "queue", "state", "headers", "last_error", "reason", "archived_at"
    )
    failures = list_failures(df)
    latest = F.max(F.struct("archived_at", "id", "line"))
    counts = failures.groupBy("queue", "reason", "error_type").agg(
        F.count("*").alias("messages"), latest.alias("latest")
    )
    total = failures.agg(F.count("*").alias("whole"))
    shares = counts.crossJoin(F.broadcast(total)).select(
        "*",
        (F.col("messages") / F.col("whole")).alias("share"),
        F.col("latest.line").alias("example"),
        F.col("latest.id").alias("last_id"),
        F.col("latest.archived_at").alias("last_at"),
    )
    ordered = shares.orderBy(F.desc("messages"), "queue", "reason", "error_type")
    return to_result(limit_rows(ordered, limit), RESULTS["top_errors"])


def list_failures(df: DataFrame, *other_columns: str) -> DataFrame:
    """Return a row for each failure, counted as in `top_errors`.

    A message may have two: it failed in its queue, was moved to a dead letter queue, and failed
    there, too. Its header describes the first failure.

    Args:
        df: As for `top_errors`.
        other_columns: More columns of `df` to return.

    Returns:
        id, archived_at and the other columns of the message; queue, reason, line (first line of
        the error) and error_type of the failure.
    """
    failed = F.when(F.col("state") == "FAILED", _build_failure("queue", "reason", "last_error"))
    moved_failure = F.when(
        _get_origin("queue").isNotNull(),
        _build_failure(_get_origin("queue"), _get_origin("reason"), _get_origin("error")),
    )
    columns = "id", "archived_at", *other_columns
    failures = df.select(
        *columns, F.explode(F.array_compact(F.array(failed, moved_failure))).alias("failure")
    )
    line = F.substring_index("failure.error", "\n", 1).alias("line")
    lines = failures.select(*columns, "failure.queue", "failure.reason", line)
    return lines.withColumn("error_type", _extract_error_type("line"))


def build_failure_condition(
    queue: str, reason: str | None = None, error_type: str | None = None
) -> Column:
    """Build the condition that a message failed in this queue and did not complete there since.

    Failures are those of `top_errors`.

    Args:
        queue: The queue of the failure: the message's own, or the one before its dead letter queue.
        reason: Only with this reason; "" for failures without a reason, None for all.
        error_type: Only with this class of exception; "" for failures without one, None for all.

    Returns:
        A condition on rows with queue, state, headers, last_error and reason.
    """
    failed_here = (F.col("state") == "FAILED") & (F.col("queue") == queue)
    # A message that was moved back keeps the header about its failure, but may have completed.
    repaired = (F.col("state") == "COMPLETED") & (F.col("queue") == queue)
    moved = (_get_origin("queue") == queue) & ~repaired
    for expected, own_value, moved_value in (
        (reason, F.col("reason"), _get_origin("reason")),
        (error_type, _extract_error_type("last_error"), _extract_error_type(_get_origin("error"))),
    ):
        if expected is not None:
            failed_here &= F.coalesce(own_value, F.lit("")) == expected
            moved &= F.coalesce(moved_value, F.lit("")) == expected
    return F.coalesce(failed_here, F.lit(False)) | F.coalesce(moved, F.lit(False))


def dlq_age(
    df: DataFrame, as_of: TimeInput | None = None, *, live: DataFrame | None = None
) -> DataFrame:
    """Count dead letters by age.

    Dead letters are messages that are FAILED by their last row in the archive, dead since
    archived_at. A message that was retried afterwards is not counted; a message that `replay` has
    published again is. If `live` is given, messages in dead letter queues are counted, too (the
    header "dead-letter" names another queue), dead since their last attempt there, or since they
    were due there. They count for the queue that they came from.

    Args:
        df: A frame with queue, state, headers and archived_at; and with id, as an export may have
            several rows of a message. Without id each row counts as a message.
        as_of: Ages are computed for this time, and messages that were archived or died later are
            left out; None is the latest such time in the frames, and messages due later than now
            have age 0.
        live: A frame of `read_messages` with queue, headers, last_attempt_at and next_attempt_at.

    Returns:
        queue STRING, messages BIGINT, under_1h, 1h_to_1d, 1d_to_7d, 7d_to_30d, over_30d BIGINT
        (messages by age, each from its first bound on), oldest_at TIMESTAMP, oldest_age DOUBLE
        (seconds).

    Raises:
        SetupError: `as_of` is no time, or columns are missing.
    """
    as_of_time = parse_time("as_of", as_of)
    require_columns(df, "dlq_age", "queue", "state", "headers", "archived_at")
    queue = F.coalesce(_get_origin("queue"), F.col("queue")).alias("queue")
    archived_rows = (
        df if as_of_time is None else df.where(F.col("archived_at") <= F.lit(as_of_time))
    )
    times = archived_rows.select(F.col("archived_at").alias("at"))
    dead = (
        _select_last_rows(archived_rows)
        .where("state = 'FAILED'")
        .select(queue, F.col("archived_at").alias("at"))
    )
    if live is not None:
        require_columns(
            live, "dlq_age (live)", "queue", "headers", "last_attempt_at", "next_attempt_at"
        )
        # next_attempt_at is in the future before a retry. A message that was moved back by hand
        # keeps the header, so the queue is compared.
        since = F.coalesce("last_attempt_at", "next_attempt_at").alias("at")
        waiting = live.where(_get_origin("queue") != F.col("queue")).select(queue, since)
        dead = dead.unionAll(waiting)
        # A message that was delayed on its way into the dead letter queue is due in the future.
        times = times.unionAll(waiting.select("at").where("at <= current_timestamp()"))
    with_age = (
        _add_now(dead, times, as_of_time)
        .where("at <= now")
        .withColumn("age", build_seconds_between(F.col("at"), F.col("now")))
    )
    counts = with_age.groupBy("queue").agg(
        F.count("*").alias("messages"),
        *_count_ages(),
        F.min("at").alias("oldest_at"),
        F.max("age").alias("oldest_age"),
    )
    return to_result(counts, RESULTS["dlq_age"])


def _add_now(dead: DataFrame, times: DataFrame, as_of_time: datetime | None) -> DataFrame:
    """Add the column `now`, the time at which ages are measured.

    It is `as_of_time` if given. Otherwise it is the latest of `times`, so that the same frame gives
    the same ages every day; a later `at`, of a message due in the future, is lowered to it.
    """
    if as_of_time is not None:
        return dead.withColumn("now", F.lit(as_of_time))
    now = F.coalesce(F.max("at"), F.current_timestamp()).alias("now")
    with_now = dead.crossJoin(F.broadcast(times.agg(now)))
    return with_now.withColumn("at", F.least("at", "now"))


def _select_last_rows(df: DataFrame) -> DataFrame:
    """Keep the latest archived row of each message.

    A lake has several rows of a message that was retried. Without the column id, each row counts as
    a message. Messages with one id differ in created_at.
    """
    if "id" not in df.columns:
        return df
    identity = [name for name in ("id", "created_at") if name in df.columns]
    last = F.max_by(F.struct("queue", "state", "headers", "archived_at"), "archived_at")
    return df.groupBy(*identity).agg(last.alias("last")).select("last.*")


def _count_ages() -> list[Column]:
    """Return a count of dead letters for each range of ages; needs the column age, in seconds.

    Each range ends where the next begins, and the last has no end.
    """
    bounds = {
        "under_1h": 0,
        "1h_to_1d": HOUR_SECONDS,
        "1d_to_7d": DAY_SECONDS,
        "7d_to_30d": 7 * DAY_SECONDS,
        "over_30d": 30 * DAY_SECONDS,
    }
    starts = [*bounds.values()]
    age = F.col("age")
    return [
        F.count_if((age >= start) & (age < end)).alias(name)
        for (name, start), end in zip(bounds.items(), [*starts[1:], float("inf")], strict=True)
    ]


def _extract_error_type(error: str | Column) -> Column:
    """Return the class of the exception; NULL without an exception.

    An error is stored as the class, a colon and the text, so the class ends there.
    """
    type_name = F.regexp_extract(error, r"^([^\s:]+)", 1)
    return F.when(type_name != "", type_name)


def _get_origin(name: str) -> Column:
    """Return a field of the header "dead-letter", which describes the original failure.

    The broker sets this header when a failed message is moved to a dead letter queue.
    """
    return get_header(f"['dead-letter'].{name}")


def _build_failure(queue: str | Column, reason: str | Column, error: str | Column) -> Column:
    """Return a struct that describes a failure: queue, reason and error.

    A failure in the message's own queue and a failure before a dead letter queue both take this
    shape, so that one explode yields both.
    """
    fields = {"queue": queue, "reason": reason, "error": error}
    return F.struct(
        *(
            (F.col(column) if isinstance(column, str) else column).alias(name)
            for name, column in fields.items()
        )
    )


def policy_effects(df: DataFrame) -> DataFrame:
    """Count messages whose end was not decided by a handler, by cause.

    | effect | state | by |
    |---|---|---|
    | superseded | DISCARDED | Debounce: a newer message of the key was delivered |
    | duplicate | DISCARDED | Once: another message of the key was handled |
    | expired | DISCARDED | expires_in |
    | throttled | DISCARDED or FAILED | Throttle with "drop" or "dead_letter" |
    | no_key | FAILED | a policy with without_key="dead_letter" |
    | failed_once | FAILED | Once, after an error |
    | unknown_outcome | FAILED | Once or ACK_FIRST, after a crash |
    | max_deliveries | FAILED | too many of its deliveries ended without an outcome |
    | no_outcome | FAILED | AckPolicy.MANUAL: its handler ended and had not settled it |
    | retry_strategy_error | FAILED | the retry strategy raised an error |
    | settle_error | FAILED | the database refused its end again and again |
    | other | DISCARDED | any other reason |

    Args:
        df: A frame with queue, state and reason.

    Returns:
        queue, effect, state STRING, messages BIGINT, share DOUBLE (of all messages of the queue).

    Raises:
        SetupError: columns are missing.
    """
    require_columns(df, "policy_effects", "queue", "state", "reason")
    reason = F.col("reason")
    is_discarded = F.col("state") == "DISCARDED"
    effect = (
        F.when(is_discarded & reason.isin(*DISCARD_REASONS), reason)
        # Older rows have the other message's id in the text.
        .when(is_discarded & reason.rlike(r"^superseded by \d+$"), SUPERSEDED)
        .when(is_discarded & reason.rlike(r"^duplicate of \d+$"), DUPLICATE)
        .when(is_discarded, OTHER_EFFECT)
        .when((F.col("state") == "FAILED") & reason.isin(*FAILURE_REASONS), reason)
    )
    counts = (
        df.select("queue", "state", effect.alias("effect"))
        .where(F.col("effect").isNotNull())
        .groupBy("queue", "effect", "state")
        .agg(F.count("*").alias("messages"))
    )
    totals = df.groupBy("queue").agg(F.count("*").alias("whole"))
    shares = counts.join(totals, "queue").withColumn("share", F.col("messages") / F.col("whole"))
    return to_result(shares, RESULTS["policy_effects"])


def duplicate_deliveries(df: DataFrame) -> DataFrame:
    """Count deliveries without a recorded end, after which the message was delivered again.

    Such a delivery belongs to a process that died, a lease that expired, or an outcome that was
    never stored: the handler may have run, partly or completely, once more than attempts_count
    says. A message has deliveries_count − attempts_count of them; one less if its last delivery
    ended without an attempt (expired at the start, delivered too often), because that delivery was
    not repeated.

    Args:
        df: A frame with queue, attempts_count, deliveries_count, acquired_at and last_attempt_at.

    Returns:
        queue STRING, messages (all of the queue), redelivered (messages with lost deliveries),
        lost_deliveries BIGINT, share DOUBLE (redelivered / messages), most INT (of one message).

    Raises:
        SetupError: columns are missing.
    """
    columns = "queue", "attempts_count", "deliveries_count", "acquired_at", "last_attempt_at"
    require_columns(df, "duplicate_deliveries", *columns)
    acquired = F.col("acquired_at")
    attempted = F.col("last_attempt_at")
    # The last delivery has ended without an attempt, for example because the message was expired.
    unstarted = F.when(
        acquired.isNotNull() & (attempted.isNull() | (attempted < acquired)), 1
    ).otherwise(0)
    lost_count = F.greatest(
        F.col("deliveries_count") - F.col("attempts_count") - unstarted, F.lit(0)
    )
    counts = (
        df.select("queue", lost_count.alias("lost"))
        .groupBy("queue")
        .agg(
            F.count("*").alias("messages"),
            F.count_if(F.col("lost") > 0).alias("redelivered"),
            F.sum("lost").alias("lost_deliveries"),
            F.max("lost").alias("most"),
        )
    )
    return to_result(
        counts.withColumn("share", F.col("redelivered") / F.col("messages")),
        RESULTS["duplicate_deliveries"],
    )
