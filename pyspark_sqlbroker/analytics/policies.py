"""What policies, expiry and lost leases did to messages."""

from pyspark.sql import DataFrame
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
from pyspark_sqlbroker.analytics.results import RESULTS, need, shaped

OTHER = "other"


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
    | max_deliveries | FAILED | it was delivered too often without an end |
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
