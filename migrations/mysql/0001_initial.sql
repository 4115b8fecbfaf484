CREATE TABLE message_schema_version (
    version_num VARCHAR(32) NOT NULL,
    CONSTRAINT message_schema_version_pkc PRIMARY KEY (version_num)
);

-- Running upgrade  -> 0001

CREATE TABLE message (
    id BIGINT NOT NULL AUTO_INCREMENT,
    queue VARCHAR(255) CHARACTER SET utf8mb4 COLLATE utf8mb4_bin NOT NULL,
    priority SMALLINT NOT NULL DEFAULT 0,
    `key` VARCHAR(255) CHARACTER SET utf8mb4 COLLATE utf8mb4_bin,
    dedup_id VARCHAR(255) CHARACTER SET utf8mb4 COLLATE utf8mb4_bin,
    headers JSON,
    payload LONGBLOB NOT NULL,
    state VARCHAR(16) CHARACTER SET utf8mb4 COLLATE utf8mb4_bin NOT NULL DEFAULT 'PENDING',
    attempts_count INTEGER NOT NULL DEFAULT 0,
    deliveries_count INTEGER NOT NULL DEFAULT 0,
    publish_count INTEGER NOT NULL DEFAULT 1,
    origin_id BIGINT,
    created_at DATETIME(6) NOT NULL DEFAULT (UTC_TIMESTAMP(6)),
    next_attempt_at DATETIME(6) NOT NULL DEFAULT (UTC_TIMESTAMP(6)),
    expires_at DATETIME(6),
    first_attempt_at DATETIME(6),
    last_attempt_at DATETIME(6),
    acquired_at DATETIME(6),
    last_error LONGTEXT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin,
    hops SMALLINT NOT NULL DEFAULT 0,
    policy_key VARCHAR(255) CHARACTER SET utf8mb4 COLLATE utf8mb4_bin,
    lease_token CHAR(32),
    lease_expires_at DATETIME(6),
    policy_marks SMALLINT NOT NULL DEFAULT 0,
    claimable SMALLINT GENERATED ALWAYS AS (CASE WHEN state IN ('PENDING', 'RETRYABLE') THEN 1 END) VIRTUAL,
    PRIMARY KEY (id),
    CONSTRAINT message_state_check CHECK (state IN ('PENDING', 'PROCESSING', 'RETRYABLE')),
    CONSTRAINT message_priority_check CHECK (priority BETWEEN -100 AND 100),
    CONSTRAINT message_counts_check CHECK (attempts_count >= 0 AND deliveries_count >= 0),
    CONSTRAINT message_lease_check CHECK ((state = 'PROCESSING') = (lease_token IS NOT NULL AND lease_expires_at IS NOT NULL)),
    CONSTRAINT message_token_check CHECK ((lease_token IS NULL) = (lease_expires_at IS NULL))
)ENGINE=InnoDB CHARSET=utf8mb4 COLLATE utf8mb4_bin;

CREATE UNIQUE INDEX message_dedup ON message (queue, dedup_id);

CREATE INDEX message_key ON message (queue, `key`, id);

CREATE INDEX message_leased ON message (queue, lease_expires_at);

CREATE INDEX message_policy_key ON message (queue, policy_key, id);

CREATE INDEX message_ready ON message (claimable, queue, priority, next_attempt_at, id);

CREATE TABLE message_archive (
    id BIGINT NOT NULL,
    queue VARCHAR(255) CHARACTER SET utf8mb4 COLLATE utf8mb4_bin NOT NULL,
    priority SMALLINT NOT NULL DEFAULT 0,
    `key` VARCHAR(255) CHARACTER SET utf8mb4 COLLATE utf8mb4_bin,
    dedup_id VARCHAR(255) CHARACTER SET utf8mb4 COLLATE utf8mb4_bin,
    headers JSON,
    payload LONGBLOB NOT NULL,
    state VARCHAR(16) CHARACTER SET utf8mb4 COLLATE utf8mb4_bin NOT NULL,
    attempts_count INTEGER NOT NULL DEFAULT 0,
    deliveries_count INTEGER NOT NULL DEFAULT 0,
    publish_count INTEGER NOT NULL DEFAULT 1,
    origin_id BIGINT,
    created_at DATETIME(6) NOT NULL,
    next_attempt_at DATETIME(6) NOT NULL,
    expires_at DATETIME(6),
    first_attempt_at DATETIME(6),
    last_attempt_at DATETIME(6),
    acquired_at DATETIME(6),
    last_error LONGTEXT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin,
    hops SMALLINT NOT NULL DEFAULT 0,
    policy_key VARCHAR(255) CHARACTER SET utf8mb4 COLLATE utf8mb4_bin,
    archived_at DATETIME(6) NOT NULL DEFAULT (UTC_TIMESTAMP(6)),
    reason VARCHAR(255) CHARACTER SET utf8mb4 COLLATE utf8mb4_bin,
    related_id BIGINT,
    error_fingerprint VARCHAR(16) CHARACTER SET utf8mb4 COLLATE utf8mb4_bin,
    PRIMARY KEY (id),
    CONSTRAINT message_archive_state_check CHECK (state IN ('COMPLETED', 'FAILED', 'DISCARDED'))
)ENGINE=InnoDB CHARSET=utf8mb4 COLLATE utf8mb4_bin;

CREATE INDEX message_archive_archived ON message_archive (archived_at, id);

CREATE INDEX message_archive_queue ON message_archive (queue, archived_at);

CREATE INDEX message_archive_uncompleted ON message_archive (state, archived_at, id);

CREATE TABLE message_policy_state (
    scope VARCHAR(300) CHARACTER SET utf8mb4 COLLATE utf8mb4_bin NOT NULL,
    `key` VARCHAR(255) CHARACTER SET utf8mb4 COLLATE utf8mb4_bin NOT NULL,
    created_at DATETIME(6) NOT NULL DEFAULT (UTC_TIMESTAMP(6)),
    lease_token CHAR(32),
    lease_expires_at DATETIME(6),
    info JSON,
    expires_at DATETIME(6),
    counter BIGINT NOT NULL DEFAULT 0,
    due_at DATETIME(6),
    PRIMARY KEY (scope, `key`)
)ENGINE=InnoDB CHARSET=utf8mb4 COLLATE utf8mb4_bin;

CREATE INDEX message_policy_state_due ON message_policy_state (scope, due_at);

CREATE INDEX message_policy_state_expiry ON message_policy_state (expires_at);

INSERT INTO message_schema_version (version_num) VALUES ('0001');

