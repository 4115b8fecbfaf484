BEGIN;

CREATE OR REPLACE FUNCTION "public"."sqlbroker_publish_bytes"(
  queue text,
  body bytea,
  content_type text DEFAULT NULL,
  headers jsonb DEFAULT NULL,
  priority integer DEFAULT 0,
  key text DEFAULT NULL,
  dedup_id text DEFAULT NULL,
  delay interval DEFAULT NULL,
  due_at timestamptz DEFAULT NULL,
  expires_in interval DEFAULT NULL,
  correlation_id text DEFAULT NULL,
  reply_to text DEFAULT NULL,
  notify boolean DEFAULT false
) RETURNS bigint LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $sqlbroker$
#variable_conflict use_column
DECLARE
  name record;
  due timestamptz;
  merged jsonb;
  new_id bigint;
BEGIN
  FOR name IN SELECT * FROM (VALUES ('queue', $1), ('key', $6), ('dedup_id', $7)) AS n(what, given)
  LOOP
    IF length(name.given) NOT BETWEEN 1 AND 255 OR name.given LIKE '% '
        OR (name.what = 'queue' AND name.given IS NULL) THEN
      RAISE EXCEPTION '% cannot be %: it is a text of 1 to 255 characters without a space at '
        'its end', name.what, coalesce(quote_literal(name.given), 'NULL')
        USING ERRCODE = 'invalid_parameter_value';
    END IF;
  END LOOP;
  IF $1 ~ '^[.]{1,2}$|(?<![{])[{][a-zA-Z0-9_]+[}](?![}])' THEN
    RAISE EXCEPTION 'queue cannot be %: a name in braces makes it a template, and . and .. are '
      'steps of a path in a URL', quote_literal($1) USING ERRCODE = 'invalid_parameter_value';
  END IF;
  IF $2 IS NULL THEN
    RAISE EXCEPTION 'body cannot be NULL: an empty body is empty bytes, and JSON has a null of its '
      'own' USING ERRCODE = 'null_value_not_allowed';
  END IF;
  IF jsonb_typeof($4) NOT IN ('object', 'null') THEN
    RAISE EXCEPTION 'headers must be a JSON object, got %', $4
      USING ERRCODE = 'invalid_parameter_value';
  END IF;
  IF coalesce($5, 0) NOT BETWEEN -100 AND 100 THEN
    RAISE EXCEPTION 'priority must be from -100 to 100, got %', $5
      USING ERRCODE = 'invalid_parameter_value';
  END IF;
  IF $8 IS NOT NULL AND $9 IS NOT NULL THEN
    RAISE EXCEPTION 'give delay or due_at, not both' USING ERRCODE = 'invalid_parameter_value';
  END IF;
  IF $10 <= interval '0' THEN
    RAISE EXCEPTION 'expires_in must be longer than 0, got %', $10
      USING ERRCODE = 'invalid_parameter_value';
  END IF;
  due := CASE
    WHEN $8 > interval '0' THEN statement_timestamp() + $8
    WHEN $9 IS NOT NULL THEN greatest(least($9, '9999-01-01 00:00+00'), '1000-01-01 00:00+00')
    ELSE statement_timestamp() END;
  merged := jsonb_strip_nulls(jsonb_build_object(
    'content-type', $3, 'correlation_id', $11, 'reply_to', nullif($12, '')))
    || coalesce(nullif($4, 'null'), '{}');
  INSERT INTO "public"."message" (queue, payload, headers, priority, key, dedup_id, created_at,
    next_attempt_at, expires_at)
  VALUES ($1, $2, nullif(merged, '{}'), coalesce($5, 0), $6, $7, statement_timestamp(), due,
    statement_timestamp() + $10)
  ON CONFLICT (queue, dedup_id) WHERE dedup_id IS NOT NULL DO NOTHING
  RETURNING id INTO new_id;
  IF $13 AND new_id IS NOT NULL AND due <= statement_timestamp() THEN
    PERFORM pg_notify('sqlbroker_message', $1);
  END IF;
  RETURN new_id;
END $sqlbroker$;

REVOKE ALL ON FUNCTION "public"."sqlbroker_publish_bytes"(text, bytea, text, jsonb, integer, text, text, interval, timestamptz, interval, text, text, boolean) FROM PUBLIC;

COMMENT ON FUNCTION "public"."sqlbroker_publish_bytes"(text, bytea, text, jsonb, integer, text, text, interval, timestamptz, interval, text, text, boolean) IS 'faststream_sqlbroker functions, version 1';

CREATE OR REPLACE FUNCTION "public"."sqlbroker_publish"(
  queue text,
  body jsonb,
  headers jsonb DEFAULT NULL,
  priority integer DEFAULT 0,
  key text DEFAULT NULL,
  dedup_id text DEFAULT NULL,
  delay interval DEFAULT NULL,
  due_at timestamptz DEFAULT NULL,
  expires_in interval DEFAULT NULL,
  correlation_id text DEFAULT NULL,
  reply_to text DEFAULT NULL,
  notify boolean DEFAULT false
) RETURNS bigint LANGUAGE sql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $sqlbroker$
  SELECT "public"."sqlbroker_publish_bytes"($1, convert_to($2::text, 'UTF8'), 'application/json',
    $3, $4, $5, $6, $7, $8, $9, $10, $11, $12)
$sqlbroker$;

REVOKE ALL ON FUNCTION "public"."sqlbroker_publish"(text, jsonb, jsonb, integer, text, text, interval, timestamptz, interval, text, text, boolean) FROM PUBLIC;

COMMENT ON FUNCTION "public"."sqlbroker_publish"(text, jsonb, jsonb, integer, text, text, interval, timestamptz, interval, text, text, boolean) IS 'faststream_sqlbroker functions, version 1';

CREATE OR REPLACE FUNCTION "public"."sqlbroker_cancel"(
  id bigint,
  why text DEFAULT NULL
) RETURNS boolean LANGUAGE sql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $sqlbroker$
  WITH waiting AS (
    SELECT m.id FROM "public"."message" m
    WHERE m.id = $1 AND m.state IN ('PENDING', 'RETRYABLE') FOR UPDATE SKIP LOCKED
  ), gone AS (
    DELETE FROM "public"."message" m USING waiting w WHERE m.id = w.id RETURNING m.*
  ), archived AS (
    INSERT INTO "public"."message_archive" (id, queue, priority, key, dedup_id, headers, payload, attempts_count, deliveries_count, publish_count, origin_id, created_at, next_attempt_at, expires_at, first_attempt_at, last_attempt_at, acquired_at, hops, policy_key, state, archived_at, reason, last_error)
    SELECT g.id, g.queue, g.priority, g.key, g.dedup_id, g.headers, g.payload, g.attempts_count, g.deliveries_count, g.publish_count, g.origin_id, g.created_at, g.next_attempt_at, g.expires_at, g.first_attempt_at, g.last_attempt_at, g.acquired_at, g.hops, g.policy_key, 'DISCARDED', statement_timestamp(), 'cancelled',
      concat('cancelled by ', session_user, ': ' || $2, E'\n' || g.last_error)
    FROM gone g
  )
  SELECT count(*) > 0 FROM gone
$sqlbroker$;

REVOKE ALL ON FUNCTION "public"."sqlbroker_cancel"(bigint, text) FROM PUBLIC;

COMMENT ON FUNCTION "public"."sqlbroker_cancel"(bigint, text) IS 'faststream_sqlbroker functions, version 1';

CREATE OR REPLACE FUNCTION "public"."sqlbroker_load"(
  queue text,
  most integer DEFAULT 10000
) RETURNS bigint LANGUAGE plpgsql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $sqlbroker$
#variable_conflict use_column
DECLARE
  level smallint;
  counted bigint;
  total bigint := 0;
  room bigint := greatest(coalesce($2, 10000), 0);
BEGIN
  IF EXISTS (SELECT FROM "public"."message_policy_state" s WHERE s.scope = 'paused' AND s.key = $1
      AND (s.expires_at IS NULL OR s.expires_at > statement_timestamp())) THEN
    RETURN 0;
  END IF;
  SELECT max(m.priority) INTO level FROM "public"."message" m
  WHERE m.queue = $1 AND m.state IN ('PENDING', 'RETRYABLE');
  WHILE level IS NOT NULL AND total < room LOOP
    SELECT count(*) INTO counted FROM (
      SELECT FROM "public"."message" m
      WHERE m.queue = $1 AND m.priority = level AND m.state IN ('PENDING', 'RETRYABLE')
        AND m.next_attempt_at <= statement_timestamp()
      LIMIT room - total) AS due;
    total := total + counted;
    SELECT max(m.priority) INTO level FROM "public"."message" m
    WHERE m.queue = $1 AND m.priority < level AND m.state IN ('PENDING', 'RETRYABLE');
  END LOOP;
  SELECT count(*) INTO counted FROM (
    SELECT FROM "public"."message" m WHERE m.queue = $1 AND m.state = 'PROCESSING'
    LIMIT room - total) AS running;
  RETURN total + counted;
END $sqlbroker$;

REVOKE ALL ON FUNCTION "public"."sqlbroker_load"(text, integer) FROM PUBLIC;

COMMENT ON FUNCTION "public"."sqlbroker_load"(text, integer) IS 'faststream_sqlbroker functions, version 1';

COMMIT;
