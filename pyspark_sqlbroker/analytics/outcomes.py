"""How messages ended: what failed, how often it was tried, what lies among the dead letters.

And what policies, expiry and lost leases did.
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
    limited,
    need,
    outcome_counts,
    seconds,
    shaped,
)
from pyspark_sqlbroker.load.decode import header
from pyspark_sqlbroker.moments import Moment, parse_moment

HOUR = 3600
"""Seconds."""

DAY = 24 * HOUR
"""Seconds."""

OTHER = "other"

DISCARDED_BY = (SUPERSEDED, DUPLICATE, EXPIRED, THROTTLED)

FAILED_BY = (
    THROTTLED,
    NO_KEY,
    FAILED_ONCE,
    UNKNOWN_OUTCOME,
    MAX_DELIVERIES,
    NO_OUTCOME,
    RETRY_STRATEGY_ERROR,
    SETTLE_ERROR,
)
"""Reasons of FAILED messages that no handler gave."""


def retry_histogram(df: DataFrame) -> DataFrame:
    """How many attempts messages took.

    Args:
        df: With queue, state and attempts_count.

    Returns:
        queue STRING, attempts INT (0: it never ran), messages, completed, failed, discarded BIGINT.

    Raises:
        SetupError: columns are missing.
    """
    need(df, "retry_histogram", "queue", "state", "attempts_count")
    counted = df.groupBy("queue", F.col("attempts_count").alias("attempts")).agg(
        F.count("*").alias("messages"), *outcome_counts()
    )
    return shaped(counted, RESULTS["retry_histogram"])


def failure_rate(df: DataFrame) -> DataFrame:
    """The share of each queue's messages that failed.

    A message that a `dead_letter_queue` took over failed in the queue that it came from, where it
    counts as moved; what became of it since counts for the queue that it was archived from. Those
    that still wait in a dead letter queue are not in the archive, and not here.

    Args:
        df: With queue, state and headers.

    Returns:
        queue STRING, completed, failed, discarded, moved BIGINT, rate DOUBLE ((failed + moved) /
        (completed + failed + moved), between 0 and 1; NULL where the queue has none of these).

    Raises:
        SetupError: columns are missing.
    """
    need(df, "failure_rate", "queue", "state", "headers")
    moves = F.when(
        _origin("queue").isNotNull(),
        F.struct(_origin("queue").alias("queue"), F.lit("MOVED").alias("state")),
    )
    own = F.struct(F.col("queue"), F.col("state"))
    events = df.select(F.explode(F.array_compact(F.array(own, moves))).alias("event")).select(
        "event.*"
    )
    counted = events.groupBy("queue").agg(
        *outcome_counts(), F.count_if(F.col("state") == "MOVED").alias("moved")
    )
    return shaped(counted.withColumn("rate", rate()), RESULTS["failure_rate"])


def rate() -> Column:
    """The share that failed, of the counts completed, failed and moved; NULL where all are 0."""
    bad = F.col("failed") + F.col("moved")
    ended = F.col("completed") + bad
    return F.when(ended > 0, bad / ended)


def top_errors(df: DataFrame, limit: int | None = 20) -> DataFrame:
    """What failures have in common: reason and class of the exception, the most frequent first.

    A failure is a FAILED message, and one that a `dead_letter_queue` took over: that one counts for
    the queue that it came from, with the reason and error of that time.

    Args:
        df: With id, queue, state, headers, last_error, reason and archived_at.
        limit: How many rows, over all queues; None is all.

    Returns:
        queue, reason (such as "max_attempts" or "rejected"), error_type (class of the exception,
        with its module; NULL if there was none) STRING, messages BIGINT, share DOUBLE (of all
        failures in the frame), example STRING (first line of the latest error: type and text),
        last_id BIGINT, last_at TIMESTAMP (the latest message and when it was archived). The most
        messages first, then by queue, reason and type.

    Raises:
        SetupError: columns are missing, or `limit` is no whole number above 0.
    """
    need(df, "top_errors", "id", "queue", "state", "headers", "last_error", "reason", "archived_at")
    named = single_failures(df)
    latest = F.max(F.struct("archived_at", "id", "line"))
    counted = named.groupBy("queue", "reason", "error_type").agg(
        F.count("*").alias("messages"), latest.alias("latest")
    )
    whole = named.agg(F.count("*").alias("whole"))
    shares = counted.crossJoin(F.broadcast(whole)).select(
        "*",
        (F.col("messages") / F.col("whole")).alias("share"),
        F.col("latest.line").alias("example"),
        F.col("latest.id").alias("last_id"),
        F.col("latest.archived_at").alias("last_at"),
    )
    ordered = shares.orderBy(F.desc("messages"), "queue", "reason", "error_type")
    return shaped(limited(ordered, limit), RESULTS["top_errors"])


def single_failures(df: DataFrame, *carried: str) -> DataFrame:
    """A row for each failure, as `top_errors` counts them.

    Args:
        df: As for `top_errors`.
        carried: Other columns of `df` that each row keeps.

    Returns:
        id, archived_at and the carried columns of the message; queue, reason, line (first line of
        the error) and error_type of the failure.
    """
    failed = F.when(F.col("state") == "FAILED", _failure("queue", "reason", "last_error"))
    moved = F.when(
        _origin("queue").isNotNull(),
        _failure(_origin("queue"), _origin("reason"), _origin("error")),
    )
    kept = "id", "archived_at", *carried
    each = df.select(*kept, F.explode(F.array_compact(F.array(failed, moved))).alias("failure"))
    line = F.substring_index("failure.error", "\n", 1).alias("line")
    lines = each.select(*kept, "failure.queue", "failure.reason", line)
    return lines.withColumn("error_type", _type_of("line"))


def failed_with(queue: str, reason: str | None = None, error_type: str | None = None) -> Column:
    """Whether a message failed in this queue, as `top_errors` has it, and did not complete there
    since.

    Args:
        queue: Where it failed: its own, or the one that a dead letter queue took it from.
        reason: Only with this reason; "" is those without any, None all.
        error_type: Only with this class of exception; "" is those without any, None all.

    Returns:
        A condition on rows with queue, state, headers, last_error and reason.
    """
    own = (F.col("state") == "FAILED") & (F.col("queue") == queue)
    # One that was moved back keeps the header.
    repaired = (F.col("state") == "COMPLETED") & (F.col("queue") == queue)
    moved = (_origin("queue") == queue) & ~repaired
    for wanted, of_own, of_moved in (
        (reason, F.col("reason"), _origin("reason")),
        (error_type, _type_of("last_error"), _type_of(_origin("error"))),
    ):
        if wanted is not None:
            own &= F.coalesce(of_own, F.lit("")) == wanted
            moved &= F.coalesce(of_moved, F.lit("")) == wanted
    return F.coalesce(own, F.lit(False)) | F.coalesce(moved, F.lit(False))


def dlq_age(
    df: DataFrame, as_of: Moment | None = None, *, live: DataFrame | None = None
) -> DataFrame:
    """How old the dead letters are.

    These are the messages that are FAILED by their last row in the archive, dead since archived_at:
    one that was retried afterwards is none, one that `replay` has published again stays one. And,
    if `live` is given, what waits in dead letter queues (the header "dead-letter" names another
    queue), dead since its last attempt there, or since it was due there if there was none. What a
    dead letter queue took counts for the queue that it came from.

    Args:
        df: With queue, state, headers and archived_at; and with id, without which each row is a
            message. An export may have several rows of one.
        as_of: Ages are told as of this moment, and what was archived or died later is left out;
            None is the latest such time in the frames, and what is due later than now has age 0.
        live: A frame of `read_messages`: with queue, headers, last_attempt_at and next_attempt_at.

    Returns:
        queue STRING, messages BIGINT, under_1h, 1h_to_1d, 1d_to_7d, 7d_to_30d, over_30d BIGINT
        (messages by age, each from its first bound on), oldest_at TIMESTAMP, oldest_age DOUBLE
        (seconds).

    Raises:
        SetupError: `as_of` is no moment, or columns are missing.
    """
    moment = parse_moment("as_of", as_of)
    need(df, "dlq_age", "queue", "state", "headers", "archived_at")
    queue = F.coalesce(_origin("queue"), F.col("queue")).alias("queue")
    known = df if moment is None else df.where(F.col("archived_at") <= F.lit(moment))
    times = known.select(F.col("archived_at").alias("at"))
    dead = (
        _last_rows(known).where("state = 'FAILED'").select(queue, F.col("archived_at").alias("at"))
    )
    if live is not None:
        need(live, "dlq_age (live)", "queue", "headers", "last_attempt_at", "next_attempt_at")
        # next_attempt_at lies in the future before a retry. A message that was moved back by hand
        # keeps the header, so the queue is compared.
        since = F.coalesce("last_attempt_at", "next_attempt_at").alias("at")
        waiting = live.where(_origin("queue") != F.col("queue")).select(queue, since)
        dead = dead.unionAll(waiting)
        # One that was delayed on its way into the dead letter queue is due in the future.
        times = times.unionAll(waiting.select("at").where("at <= current_timestamp()"))
    aged = (
        _dated(dead, times, moment)
        .where("at <= now")
        .withColumn("age", seconds(F.col("at"), F.col("now")))
    )
    counted = aged.groupBy("queue").agg(
        F.count("*").alias("messages"),
        *_ages(),
        F.min("at").alias("oldest_at"),
        F.max("age").alias("oldest_age"),
    )
    return shaped(counted, RESULTS["dlq_age"])


def _dated(dead: DataFrame, times: DataFrame, moment: datetime | None) -> DataFrame:
    """With the column now: `moment`, or the latest of `times`, at which nothing died later."""
    if moment is not None:
        return dead.withColumn("now", F.lit(moment))
    now = F.coalesce(F.max("at"), F.current_timestamp()).alias("now")
    dated = dead.crossJoin(F.broadcast(times.agg(now)))
    return dated.withColumn("at", F.least("at", "now"))


def _last_rows(df: DataFrame) -> DataFrame:
    """The row of each message that was archived last."""
    if "id" not in df.columns:
        return df
    last = F.max_by(F.struct("queue", "state", "headers", "archived_at"), "archived_at")
    return df.groupBy("id").agg(last.alias("last")).select("last.*")


def _ages() -> list[Column]:
    bounds = {
        "under_1h": 0,
        "1h_to_1d": HOUR,
        "1d_to_7d": DAY,
        "7d_to_30d": 7 * DAY,
        "over_30d": 30 * DAY,
    }
    starts = [*bounds.values()]
    age = F.col("age")
    return [
        F.count_if((age >= start) & (age < end)).alias(name)
        for (name, start), end in zip(bounds.items(), [*starts[1:], float("inf")], strict=True)
    ]


def _type_of(error: str | Column) -> Column:
    """The class of the exception; NULL without any."""
    found = F.regexp_extract(error, r"^([^\s:]+)", 1)
    return F.when(found != "", found)


def _origin(name: str) -> Column:
    """What the header "dead-letter" says of where the message failed."""
    return header(f"['dead-letter'].{name}")


def _failure(queue: str | Column, reason: str | Column, error: str | Column) -> Column:
    named = {"queue": queue, "reason": reason, "error": error}
    return F.struct(
        *((F.col(c) if isinstance(c, str) else c).alias(name) for name, c in named.items())
    )


def policy_effects(df: DataFrame) -> DataFrame:
    """Messages whose end the handler did not decide, by what ended them.

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
        df: With queue, state and reason.

    Returns:
        queue, effect, state STRING, messages BIGINT, share DOUBLE (of all messages of the queue).

    Raises:
        SetupError: columns are missing.
    """
    need(df, "policy_effects", "queue", "state", "reason")
    reason = F.col("reason")
    gone = F.col("state") == "DISCARDED"
    effect = (
        F.when(gone & reason.isin(*DISCARDED_BY), reason)
        # Older rows have the other message's id in the text.
        .when(gone & reason.rlike(r"^superseded by \d+$"), SUPERSEDED)
        .when(gone & reason.rlike(r"^duplicate of \d+$"), DUPLICATE)
        .when(gone, OTHER)
        .when((F.col("state") == "FAILED") & reason.isin(*FAILED_BY), reason)
    )
    counted = (
        df.select("queue", "state", effect.alias("effect"))
        .where(F.col("effect").isNotNull())
        .groupBy("queue", "effect", "state")
        .agg(F.count("*").alias("messages"))
    )
    whole = df.groupBy("queue").agg(F.count("*").alias("whole"))
    shares = counted.join(whole, "queue").withColumn("share", F.col("messages") / F.col("whole"))
    return shaped(shares, RESULTS["policy_effects"])


def duplicate_deliveries(df: DataFrame) -> DataFrame:
    """Deliveries whose end was never recorded, so that the message was delivered again.

    Each is a process that died, a lease that ran out or an end that the database never took: the
    handler may have run, in part or whole, once more than attempts_count says. A message has
    deliveries_count − attempts_count of them; one less if its last delivery ended without an
    attempt (expired at the start, delivered too often), because that one was not repeated.

    Args:
        df: With queue, attempts_count, deliveries_count, acquired_at and last_attempt_at.

    Returns:
        queue STRING, messages (all of the queue), redelivered (those with lost deliveries),
        lost_deliveries BIGINT, share DOUBLE (redelivered / messages), most INT (of one message).

    Raises:
        SetupError: columns are missing.
    """
    columns = "queue", "attempts_count", "deliveries_count", "acquired_at", "last_attempt_at"
    need(df, "duplicate_deliveries", *columns)
    acquired = F.col("acquired_at")
    ended = F.col("last_attempt_at")
    unstarted = F.when(acquired.isNotNull() & (ended.isNull() | (ended < acquired)), 1).otherwise(0)
    lost = F.greatest(F.col("deliveries_count") - F.col("attempts_count") - unstarted, F.lit(0))
    counted = (
        df.select("queue", lost.alias("lost"))
        .groupBy("queue")
        .agg(
            F.count("*").alias("messages"),
            F.count_if(F.col("lost") > 0).alias("redelivered"),
            F.sum("lost").alias("lost_deliveries"),
            F.max("lost").alias("most"),
        )
    )
    return shaped(
        counted.withColumn("share", F.col("redelivered") / F.col("messages")),
        RESULTS["duplicate_deliveries"],
    )
