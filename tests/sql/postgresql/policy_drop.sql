DELETE FROM message m USING json_to_recordset((:rows)::json) AS u(id bigint, reason text) WHERE m.id = u.id AND m.queue = :queue AND m.state IN ('PENDING', 'RETRYABLE')
