BEGIN;

-- Running upgrade 0002 -> 0003

ALTER TABLE message_archive ADD COLUMN error_fingerprint VARCHAR(16);

CREATE INDEX message_archive_uncompleted ON message_archive (state, archived_at, id) WHERE state <> 'COMPLETED';

UPDATE message_schema_version SET version_num='0003' WHERE message_schema_version.version_num = '0002';

COMMIT;

