-- Running upgrade 0001 -> 0002

ALTER TABLE message ADD COLUMN hops SMALLINT DEFAULT 0 NOT NULL;

ALTER TABLE message ADD COLUMN policy_key VARCHAR(255);

CREATE INDEX message_policy_key ON message (queue, policy_key, id) WHERE policy_key IS NOT NULL;

ALTER TABLE message_archive ADD COLUMN hops SMALLINT DEFAULT 0 NOT NULL;

ALTER TABLE message_archive ADD COLUMN policy_key VARCHAR(255);

ALTER TABLE message_archive ADD COLUMN related_id INTEGER;

ALTER TABLE message_policy_state ADD COLUMN due_at BIGINT;

CREATE INDEX message_policy_state_due ON message_policy_state (scope, due_at) WHERE due_at IS NOT NULL;

UPDATE message_schema_version SET version_num='0002' WHERE message_schema_version.version_num = '0001';

