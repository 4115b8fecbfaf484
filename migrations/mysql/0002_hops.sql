-- Running upgrade 0001 -> 0002

ALTER TABLE message ADD COLUMN hops SMALLINT NOT NULL DEFAULT 0, ADD COLUMN policy_key VARCHAR(255) CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;

CREATE INDEX message_policy_key ON message (queue, policy_key, id);

ALTER TABLE message_archive ADD COLUMN hops SMALLINT NOT NULL DEFAULT 0, ADD COLUMN policy_key VARCHAR(255) CHARACTER SET utf8mb4 COLLATE utf8mb4_bin, ADD COLUMN related_id BIGINT;

ALTER TABLE message_policy_state ADD COLUMN due_at DATETIME(6);

CREATE INDEX message_policy_state_due ON message_policy_state (scope, due_at);

UPDATE message_schema_version SET version_num='0002' WHERE message_schema_version.version_num = '0001';

