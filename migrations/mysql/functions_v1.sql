DELIMITER $$

SET @sqlbroker_sql_mode = @@SESSION.sql_mode, SESSION sql_mode = 'STRICT_TRANS_TABLES,NO_ZERO_IN_DATE,NO_ZERO_DATE,ERROR_FOR_DIVISION_BY_ZERO,NO_ENGINE_SUBSTITUTION'$$

DROP PROCEDURE IF EXISTS `sqlbroker_publish_bytes`$$

CREATE PROCEDURE `sqlbroker_publish_bytes`(
  IN p_queue LONGTEXT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin,
  IN p_body LONGBLOB,
  IN p_content_type LONGTEXT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin,
  IN p_options JSON,
  OUT p_id BIGINT
) MODIFIES SQL DATA SQL SECURITY DEFINER COMMENT 'faststream_sqlbroker functions, version 1'
BEGIN
  DECLARE v_queue, v_key, v_dedup_id, v_due_at, v_headers, v_correlation_id, v_reply_to, v_json,
    v_text LONGTEXT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;
  DECLARE v_priority INT;
  DECLARE v_delay, v_expires_in DECIMAL(20, 6);
  DECLARE v_now, v_due, v_expires_at DATETIME(6);
  SET p_id = NULL, v_queue = p_queue, v_now = UTC_TIMESTAMP(6);
  IF JSON_VALID(p_options) = 0 OR JSON_TYPE(p_options) <> 'OBJECT' THEN
    SET v_text = LEFT(CONCAT('options must be NULL or a JSON object, got ', p_options), 128);
    SIGNAL SQLSTATE '22023' SET MESSAGE_TEXT = v_text;
  END IF;
  SET v_text = JSON_REMOVE(p_options, '$.headers', '$.priority', '$.key', '$.dedup_id', '$.delay', '$.due_at', '$.expires_in', '$.correlation_id', '$.reply_to');
  IF JSON_LENGTH(v_text) > 0 THEN
    SET v_text = LEFT(CONCAT('unknown options ', JSON_KEYS(v_text)), 128);
    SIGNAL SQLSTATE '22023' SET MESSAGE_TEXT = v_text;
  END IF;
  SET v_json = JSON_EXTRACT(p_options, '$.headers');
  IF JSON_TYPE(v_json) NOT IN ('NULL', 'OBJECT') THEN
    SET v_text = LEFT(CONCAT('headers must be a JSON object, got ', v_json), 128);
    SIGNAL SQLSTATE '22023' SET MESSAGE_TEXT = v_text;
  END IF;
  SET v_headers = IF(JSON_TYPE(v_json) = 'NULL', NULL, v_json);
  SET v_json = JSON_EXTRACT(p_options, '$.priority');
  IF JSON_TYPE(v_json) NOT IN ('NULL', 'INTEGER') THEN
    SET v_text = LEFT(CONCAT('priority must be a whole number, got ', v_json), 128);
    SIGNAL SQLSTATE '22023' SET MESSAGE_TEXT = v_text;
  END IF;
  SET v_priority = IF(JSON_TYPE(v_json) = 'NULL', NULL, JSON_UNQUOTE(v_json));
  SET v_json = JSON_EXTRACT(p_options, '$.key');
  IF JSON_TYPE(v_json) NOT IN ('NULL', 'STRING') THEN
    SET v_text = LEFT(CONCAT('key must be a text, got ', v_json), 128);
    SIGNAL SQLSTATE '22023' SET MESSAGE_TEXT = v_text;
  END IF;
  SET v_key = IF(JSON_TYPE(v_json) = 'NULL', NULL, JSON_UNQUOTE(v_json));
  SET v_json = JSON_EXTRACT(p_options, '$.dedup_id');
  IF JSON_TYPE(v_json) NOT IN ('NULL', 'STRING') THEN
    SET v_text = LEFT(CONCAT('dedup_id must be a text, got ', v_json), 128);
    SIGNAL SQLSTATE '22023' SET MESSAGE_TEXT = v_text;
  END IF;
  SET v_dedup_id = IF(JSON_TYPE(v_json) = 'NULL', NULL, JSON_UNQUOTE(v_json));
  SET v_json = JSON_EXTRACT(p_options, '$.delay');
  IF JSON_TYPE(v_json) NOT IN ('NULL', 'INTEGER', 'DOUBLE', 'DECIMAL') THEN
    SET v_text = LEFT(CONCAT('delay must be seconds, got ', v_json), 128);
    SIGNAL SQLSTATE '22023' SET MESSAGE_TEXT = v_text;
  END IF;
  SET v_delay = IF(JSON_TYPE(v_json) = 'NULL', NULL, JSON_UNQUOTE(v_json));
  SET v_json = JSON_EXTRACT(p_options, '$.due_at');
  IF JSON_TYPE(v_json) NOT IN ('NULL', 'STRING') THEN
    SET v_text = LEFT(CONCAT('due_at must be a text such as 2026-03-01 12:00:00, in UTC, got ', v_json), 128);
    SIGNAL SQLSTATE '22023' SET MESSAGE_TEXT = v_text;
  END IF;
  SET v_due_at = IF(JSON_TYPE(v_json) = 'NULL', NULL, JSON_UNQUOTE(v_json));
  SET v_json = JSON_EXTRACT(p_options, '$.expires_in');
  IF JSON_TYPE(v_json) NOT IN ('NULL', 'INTEGER', 'DOUBLE', 'DECIMAL') THEN
    SET v_text = LEFT(CONCAT('expires_in must be seconds, got ', v_json), 128);
    SIGNAL SQLSTATE '22023' SET MESSAGE_TEXT = v_text;
  END IF;
  SET v_expires_in = IF(JSON_TYPE(v_json) = 'NULL', NULL, JSON_UNQUOTE(v_json));
  SET v_json = JSON_EXTRACT(p_options, '$.correlation_id');
  IF JSON_TYPE(v_json) NOT IN ('NULL', 'STRING') THEN
    SET v_text = LEFT(CONCAT('correlation_id must be a text, got ', v_json), 128);
    SIGNAL SQLSTATE '22023' SET MESSAGE_TEXT = v_text;
  END IF;
  SET v_correlation_id = IF(JSON_TYPE(v_json) = 'NULL', NULL, JSON_UNQUOTE(v_json));
  SET v_json = JSON_EXTRACT(p_options, '$.reply_to');
  IF JSON_TYPE(v_json) NOT IN ('NULL', 'STRING') THEN
    SET v_text = LEFT(CONCAT('reply_to must be a text, got ', v_json), 128);
    SIGNAL SQLSTATE '22023' SET MESSAGE_TEXT = v_text;
  END IF;
  SET v_reply_to = IF(JSON_TYPE(v_json) = 'NULL', NULL, JSON_UNQUOTE(v_json));
  IF v_queue IS NULL OR CHAR_LENGTH(v_queue) NOT BETWEEN 1 AND 255 OR v_queue LIKE '% ' OR LOCATE(CHAR(0), v_queue) THEN
    SET v_text = LEFT(CONCAT('queue must be a text of 1 to 255 characters without NUL and without a space at its end, got ', COALESCE(QUOTE(v_queue), 'NULL')), 128);
    SIGNAL SQLSTATE '22023' SET MESSAGE_TEXT = v_text;
  END IF;
  IF CHAR_LENGTH(v_key) NOT BETWEEN 1 AND 255 OR v_key LIKE '% ' OR LOCATE(CHAR(0), v_key) THEN
    SET v_text = LEFT(CONCAT('key must be a text of 1 to 255 characters without NUL and without a space at its end, got ', COALESCE(QUOTE(v_key), 'NULL')), 128);
    SIGNAL SQLSTATE '22023' SET MESSAGE_TEXT = v_text;
  END IF;
  IF CHAR_LENGTH(v_dedup_id) NOT BETWEEN 1 AND 255 OR v_dedup_id LIKE '% ' OR LOCATE(CHAR(0), v_dedup_id) THEN
    SET v_text = LEFT(CONCAT('dedup_id must be a text of 1 to 255 characters without NUL and without a space at its end, got ', COALESCE(QUOTE(v_dedup_id), 'NULL')), 128);
    SIGNAL SQLSTATE '22023' SET MESSAGE_TEXT = v_text;
  END IF;
  IF v_queue REGEXP '^[.]{1,2}$|(?<![{])[{][a-zA-Z0-9_]+[}](?![}])' THEN
    SET v_text = LEFT(CONCAT('queue must be no template with a name in braces, . or .., got ', v_queue), 128);
    SIGNAL SQLSTATE '22023' SET MESSAGE_TEXT = v_text;
  END IF;
  IF p_body IS NULL THEN
    SET v_text = LEFT('body cannot be NULL: an empty body is an empty text', 128);
    SIGNAL SQLSTATE '22023' SET MESSAGE_TEXT = v_text;
  END IF;
  IF v_priority NOT BETWEEN -100 AND 100 THEN
    SET v_text = LEFT(CONCAT('priority must be from -100 to 100, got ', v_priority), 128);
    SIGNAL SQLSTATE '22023' SET MESSAGE_TEXT = v_text;
  END IF;
  IF v_delay IS NOT NULL AND v_due_at IS NOT NULL THEN
    SET v_text = LEFT('give delay or due_at, not both', 128);
    SIGNAL SQLSTATE '22023' SET MESSAGE_TEXT = v_text;
  END IF;
  IF v_due_at NOT REGEXP '^[1-9][0-9]{3}-[0-9]{2}-[0-9]{2}([ T][0-9]{2}:[0-9]{2}(:[0-9]{2}([.][0-9]+)?)?)?$' THEN
    SET v_text = LEFT(CONCAT('due_at must be a text such as 2026-03-01 12:00:00, in UTC, got ', v_due_at), 128);
    SIGNAL SQLSTATE '22023' SET MESSAGE_TEXT = v_text;
  END IF;
  IF v_expires_in <= 0 THEN
    SET v_text = LEFT(CONCAT('expires_in must be more than 0 seconds, got ', v_expires_in), 128);
    SIGNAL SQLSTATE '22023' SET MESSAGE_TEXT = v_text;
  END IF;
  SET v_due = CASE
    WHEN v_delay > 0 THEN v_now + INTERVAL ROUND(v_delay * 1000000) MICROSECOND
    WHEN v_due_at IS NOT NULL THEN CAST(v_due_at AS DATETIME(6))
    ELSE v_now END;
  SET v_expires_at = v_now + INTERVAL ROUND(v_expires_in * 1000000) MICROSECOND;
  IF v_due IS NULL OR (v_expires_in IS NOT NULL AND v_expires_at IS NULL) THEN
    SET v_text = LEFT('a time is beyond the year 9999, or no time at all', 128);
    SIGNAL SQLSTATE '22023' SET MESSAGE_TEXT = v_text;
  END IF;
  SET v_headers = COALESCE(v_headers, '{}');
  -- JSON_INSERT leaves what the caller's headers have.
  IF p_content_type IS NOT NULL THEN
    SET v_headers = JSON_INSERT(v_headers, '$."content-type"', p_content_type);
  END IF;
  IF v_correlation_id IS NOT NULL THEN
    SET v_headers = JSON_INSERT(v_headers, '$.correlation_id', v_correlation_id);
  END IF;
  IF v_reply_to <> '' THEN
    SET v_headers = JSON_INSERT(v_headers, '$.reply_to', v_reply_to);
  END IF;
  BEGIN
    -- Another live message has the dedup_id: InnoDB undoes this statement alone.
    DECLARE EXIT HANDLER FOR 1062 SET p_id = NULL;
    INSERT INTO `message` (queue, payload, headers, priority, `key`, dedup_id, created_at,
      next_attempt_at, expires_at)
    VALUES (v_queue, p_body, NULLIF(v_headers, '{}'), COALESCE(v_priority, 0), v_key,
      v_dedup_id, v_now, v_due, v_expires_at);
    SET p_id = LAST_INSERT_ID();
  END;
END$$

DROP PROCEDURE IF EXISTS `sqlbroker_publish`$$

CREATE PROCEDURE `sqlbroker_publish`(
  IN p_queue LONGTEXT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin,
  IN p_body JSON,
  IN p_options JSON,
  OUT p_id BIGINT
) MODIFIES SQL DATA SQL SECURITY DEFINER COMMENT 'faststream_sqlbroker functions, version 1'
BEGIN
  DECLARE v_text LONGTEXT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;
  IF JSON_VALID(p_body) = 0 THEN
    SET v_text = LEFT(CONCAT('body must be JSON, got ', p_body), 128);
    SIGNAL SQLSTATE '22023' SET MESSAGE_TEXT = v_text;
  END IF;
  CALL `sqlbroker_publish_bytes`(p_queue, CONVERT(p_body USING utf8mb4), 'application/json', p_options,
    p_id);
END$$

DROP PROCEDURE IF EXISTS `sqlbroker_cancel`$$

CREATE PROCEDURE `sqlbroker_cancel`(
  IN p_id BIGINT,
  IN p_why LONGTEXT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin,
  OUT p_cancelled BOOLEAN
) MODIFIES SQL DATA SQL SECURITY DEFINER COMMENT 'faststream_sqlbroker functions, version 1'
BEGIN
  DECLARE v_alone BOOLEAN DEFAULT FALSE;
  DECLARE v_found BIGINT;
  DECLARE EXIT HANDLER FOR SQLEXCEPTION BEGIN
    IF v_alone THEN
      ROLLBACK;
    END IF;
    RESIGNAL;
  END;
  BEGIN
    DECLARE CONTINUE HANDLER FOR 1305 SET v_alone = TRUE;
    SAVEPOINT sqlbroker_cancel;
    RELEASE SAVEPOINT sqlbroker_cancel;
  END;
  IF v_alone THEN
    START TRANSACTION;
  END IF;
  -- Skipped, not waited for: a handler's transaction may hold its row for as long as it runs.
  SET v_found = (SELECT id FROM `message` WHERE id = p_id AND state IN ('PENDING', 'RETRYABLE')
    FOR UPDATE SKIP LOCKED);
  INSERT INTO `message_archive` (`id`, `queue`, `priority`, `key`, `dedup_id`, `headers`, `payload`, `attempts_count`, `deliveries_count`, `publish_count`, `origin_id`, `created_at`, `next_attempt_at`, `expires_at`, `first_attempt_at`, `last_attempt_at`, `acquired_at`, `hops`, `policy_key`, state, archived_at, reason, last_error)
  SELECT `id`, `queue`, `priority`, `key`, `dedup_id`, `headers`, `payload`, `attempts_count`, `deliveries_count`, `publish_count`, `origin_id`, `created_at`, `next_attempt_at`, `expires_at`, `first_attempt_at`, `last_attempt_at`, `acquired_at`, `hops`, `policy_key`, 'DISCARDED', UTC_TIMESTAMP(6), 'cancelled',
    CONCAT('cancelled by ', USER(), COALESCE(CONCAT(': ', p_why), ''),
      COALESCE(CONCAT(CHAR(10), last_error), ''))
  FROM `message` WHERE id = v_found;
  DELETE FROM `message` WHERE id = v_found;
  SET p_cancelled = v_found IS NOT NULL;
  IF v_alone THEN
    COMMIT;
  END IF;
END$$

DROP FUNCTION IF EXISTS `sqlbroker_load`$$

CREATE FUNCTION `sqlbroker_load`(p_queue VARCHAR(255) CHARACTER SET utf8mb4 COLLATE utf8mb4_bin)
RETURNS BIGINT READS SQL DATA SQL SECURITY DEFINER COMMENT 'faststream_sqlbroker functions, version 1'
BEGIN
  DECLARE v_level INT;
  DECLARE v_counted, v_total BIGINT DEFAULT 0;
  DECLARE v_left BIGINT DEFAULT 10000;
  IF EXISTS (SELECT 1 FROM `message_policy_state` s WHERE s.scope = 'paused' AND s.`key` = p_queue
      AND (s.expires_at IS NULL OR s.expires_at > UTC_TIMESTAMP(6))) THEN
    RETURN 0;
  END IF;
  SET v_level = (SELECT m.priority FROM `message` m FORCE INDEX (`message_ready`)
    WHERE m.claimable = 1 AND m.queue = p_queue
    ORDER BY m.claimable DESC, m.queue DESC, m.priority DESC LIMIT 1);
  WHILE v_level IS NOT NULL AND v_left > 0 DO
    SELECT COUNT(*) INTO v_counted FROM (
      SELECT 1 FROM `message` m FORCE INDEX (`message_ready`)
      WHERE m.claimable = 1 AND m.queue = p_queue AND m.priority = v_level
        AND m.next_attempt_at <= UTC_TIMESTAMP(6) LIMIT v_left) AS due;
    SET v_total = v_total + v_counted, v_left = v_left - v_counted;
    SET v_level = (SELECT m.priority FROM `message` m FORCE INDEX (`message_ready`)
      WHERE m.claimable = 1 AND m.queue = p_queue AND m.priority < v_level
      ORDER BY m.claimable DESC, m.queue DESC, m.priority DESC LIMIT 1);
  END WHILE;
  SELECT COUNT(*) INTO v_counted FROM (
    SELECT 1 FROM `message` m FORCE INDEX (`message_leased`)
    WHERE m.queue = p_queue AND m.lease_expires_at IS NOT NULL LIMIT v_left) AS running;
  RETURN v_total + v_counted;
END$$

SET SESSION sql_mode = @sqlbroker_sql_mode$$

DELIMITER ;
