"""An archive of finished messages, about 500 bytes each, made by the database itself."""

from sqlalchemy import Engine, create_engine, text

from faststream_sqlbroker.schema.config import SqlBrokerSchemaConfig
from faststream_sqlbroker.schema.tables import build_ddl, build_tables

DRIVERS = {"postgresql": "psycopg", "mariadb": "pymysql", "sqlite": "pysqlite"}
INTO = (
    "INSERT INTO message_archive (id, queue, priority, {key}, headers, payload, state, "
    "attempts_count, deliveries_count, publish_count, created_at, next_attempt_at, "
    "first_attempt_at, last_attempt_at, acquired_at, last_error, archived_at) "
)
_POSTGRESQL = """
SELECT g, 'queue-' || g % 20, 0, 'user-' || g % 10000,
  jsonb_build_object('content-type', 'application/json', 'correlation_id', md5(g::text)),
  convert_to('{"order_id": ' || g || ', "user": ' || g % 10000
    || ', "amount": ' || g % 977 || '.5, "note": "' || repeat(md5(g::text), 7) || '"}', 'UTF8'),
  CASE WHEN g % 50 = 0 THEN 'FAILED' ELSE 'COMPLETED' END, 1, 1, 1, t, t, t + interval '5 ms',
  t + interval '5 ms', t + interval '4 ms',
  CASE WHEN g % 50 = 0 THEN 'ValueError: no such order' END, t + interval '20 ms'
FROM generate_series(1, :count) AS g,
  LATERAL (SELECT timestamptz '2026-01-01 00:00+00' + g * interval '1.3 s') x(t)
"""
_MARIADB = """
SELECT seq, CONCAT('queue-', seq % 20), 0, CONCAT('user-', seq % 10000),
  CONCAT('{"content-type": "application/json", "correlation_id": "', MD5(seq), '"}'),
  CONCAT('{"order_id": ', seq, ', "user": ', seq % 10000,
    ', "amount": ', seq % 977, '.5, "note": "', REPEAT(MD5(seq), 7), '"}'),
  IF(seq % 50 = 0, 'FAILED', 'COMPLETED'), 1, 1, 1, t, t, t + INTERVAL 5000 MICROSECOND,
  t + INTERVAL 5000 MICROSECOND, t + INTERVAL 4000 MICROSECOND,
  IF(seq % 50 = 0, 'ValueError: no such order', NULL), t + INTERVAL 20000 MICROSECOND
FROM (SELECT seq, CAST('2026-01-01' AS DATETIME(6)) + INTERVAL seq * 1300000 MICROSECOND AS t
  FROM seq_1_to_{count}) AS s
"""
_SQLITE = """
WITH RECURSIVE s(g, t) AS (
  SELECT 1, 1767225600000000 UNION ALL SELECT g + 1, t + 1300000 FROM s WHERE g < :count)
SELECT g, 'queue-' || g % 20, 0, 'user-' || g % 10000,
  '{"content-type": "application/json", "correlation_id": "' || printf('%032x', g * 48271) || '"}',
  CAST('{"order_id": ' || g || ', "user": ' || g % 10000
    || ', "amount": ' || g % 977 || '.5, "note": "' || printf('%0224x', g * 48271) || '"}' AS BLOB),
  CASE WHEN g % 50 = 0 THEN 'FAILED' ELSE 'COMPLETED' END,
  1, 1, 1, t, t, t + 5000, t + 5000, t + 4000,
  CASE WHEN g % 50 = 0 THEN 'ValueError: no such order' END, t + 20000
FROM s
"""


def fill_archive(url: str, kind: str, count: int) -> None:
    """Make the tables in an empty database, and `count` rows; the database has looked at them at
    the end."""
    engine = create_engine(url.replace(f"{kind}://", f"{kind}+{DRIVERS[kind]}://", 1))
    tables = build_tables(SqlBrokerSchemaConfig(), dialect_name=engine.dialect.name)
    with engine.begin() as connection:
        for statement in build_ddl(tables, engine.dialect.name):
            connection.execute(statement)
    into = INTO.format(key="`key`" if kind == "mariadb" else "key")
    with engine.begin() as connection:
        if kind == "mariadb":
            connection.exec_driver_sql(
                (into + _MARIADB.replace("{count}", str(count))).replace("%", "%%")
            )
        else:
            body = _POSTGRESQL if kind == "postgresql" else _SQLITE
            connection.execute(text((into + body).replace('": ', '"\\: ')), {"count": count})
    _look(engine, kind)
    engine.dispose()


def _look(engine: Engine, kind: str) -> None:
    statement = {
        "postgresql": "VACUUM ANALYZE message_archive",
        "mariadb": "ANALYZE TABLE message_archive",
    }
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.exec_driver_sql(statement.get(kind, "ANALYZE"))
