-- Running upgrade 0002 -> 0003

ALTER TABLE message_archive ADD COLUMN error_fingerprint VARCHAR(16) CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;

CREATE INDEX message_archive_uncompleted ON message_archive (state, archived_at, id);

UPDATE message_schema_version SET version_num='0003' WHERE message_schema_version.version_num = '0002';

