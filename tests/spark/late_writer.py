"""A process that archives like a busy fleet: slow, overlapping transactions, old ids, some rolled
back.

    python -m tests.spark.late_writer URL

Each of its threads archives until a line comes on standard input; then it ends its transaction.
"""

import random
import sys
import threading
import time

from sqlalchemy import Engine, Table, create_engine
from sqlalchemy.exc import OperationalError

from faststream_sqlbroker.schema.config import SqlBrokerSchemaConfig
from faststream_sqlbroker.schema.tables import build_tables
from tests.spark.horizons import settle_in

THREADS = 3
ROWS = 3
LONGEST = 0.5
"""Seconds that a transaction lasts at most; on SQLite, where every other writer waits, a
tenth."""


def work(engine: Engine, table: Table, thread: int, ended: threading.Event) -> None:
    """Transactions of this thread; its ids fall, as if each message was older than the last."""
    dice = random.Random(thread)
    number = 1_000_000 * (thread + 1)
    longest = LONGEST / (10 if engine.dialect.name == "sqlite" else 1)
    while not ended.is_set():
        connection = engine.connect()
        try:
            for _ in range(dice.randint(1, ROWS)):
                number -= 1
                settle_in(table, connection, number)
                time.sleep(dice.random() * longest / ROWS)
            (connection.rollback if dice.random() < 0.1 else connection.commit)()
        except OperationalError:  # SQLite: others have been writing for too long
            connection.rollback()
        finally:
            connection.close()
        time.sleep(dice.random() * LONGEST / 10)


def main(url: str) -> None:
    """Archive until told to stop."""
    engine = create_engine(url)
    tables = build_tables(SqlBrokerSchemaConfig(), dialect_name=engine.dialect.name)
    assert tables.archive is not None
    ended = threading.Event()
    threads = [
        threading.Thread(target=work, args=(engine, tables.archive, thread, ended))
        for thread in range(THREADS)
    ]
    for thread in threads:
        thread.start()
    sys.stdout.write("started\n")
    sys.stdout.flush()
    sys.stdin.readline()
    ended.set()
    for thread in threads:
        thread.join()
    engine.dispose()


if __name__ == "__main__":
    main(sys.argv[1])
