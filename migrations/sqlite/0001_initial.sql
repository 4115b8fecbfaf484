CREATE TABLE message_schema_version (
    version_num VARCHAR(32) NOT NULL,
    CONSTRAINT message_schema_version_pkc PRIMARY KEY (version_num)
);

-- Running upgrade  -> 0001

CREATE TABLE message (
    id INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT,
    queue VARCHAR(255) NOT NULL,
    priority SMALLINT DEFAULT 0 NOT NULL,
    "key" VARCHAR(255),
    dedup_id VARCHAR(255),
    headers JSON,
    payload BLOB NOT NULL,
    state VARCHAR(16) DEFAULT 'PENDING' NOT NULL,
    attempts_count INTEGER DEFAULT 0 NOT NULL,
    deliveries_count INTEGER DEFAULT 0 NOT NULL,
    publish_count INTEGER DEFAULT 1 NOT NULL,
    origin_id INTEGER,
    created_at BIGINT DEFAULT (CAST(ROUND((julianday('now') - 2440587.5) * 86400000.0) AS INTEGER) * 1000) NOT NULL,
    next_attempt_at BIGINT DEFAULT (CAST(ROUND((julianday('now') - 2440587.5) * 86400000.0) AS INTEGER) * 1000) NOT NULL,
    expires_at BIGINT,
    first_attempt_at BIGINT,
    last_attempt_at BIGINT,
    acquired_at BIGINT,
    last_error TEXT,
    hops SMALLINT DEFAULT 0 NOT NULL,
    policy_key VARCHAR(255),
    lease_token CHAR(32),
    lease_expires_at BIGINT,
    policy_marks SMALLINT DEFAULT 0 NOT NULL,
    CONSTRAINT message_state_check CHECK (state IN ('PENDING', 'PROCESSING', 'RETRYABLE')),
    CONSTRAINT message_priority_check CHECK (priority BETWEEN -100 AND 100),
    CONSTRAINT message_counts_check CHECK (attempts_count >= 0 AND deliveries_count >= 0),
    CONSTRAINT message_lease_check CHECK ((state = 'PROCESSING') = (lease_token IS NOT NULL AND lease_expires_at IS NOT NULL)),
    CONSTRAINT message_token_check CHECK ((lease_token IS NULL) = (lease_expires_at IS NULL))
);

CREATE UNIQUE INDEX message_dedup ON message (queue, dedup_id) WHERE dedup_id IS NOT NULL;

CREATE INDEX message_key ON message (queue, "key", id) WHERE key IS NOT NULL;

CREATE INDEX message_leased ON message (queue, lease_expires_at) WHERE state = 'PROCESSING';

CREATE INDEX message_policy_key ON message (queue, policy_key, id) WHERE policy_key IS NOT NULL;

CREATE INDEX message_ready ON message (queue, priority DESC, next_attempt_at, id) WHERE state IN ('PENDING', 'RETRYABLE');

CREATE TABLE message_archive (
    id INTEGER NOT NULL,
    queue VARCHAR(255) NOT NULL,
    priority SMALLINT DEFAULT 0 NOT NULL,
    "key" VARCHAR(255),
    dedup_id VARCHAR(255),
    headers JSON,
    payload BLOB NOT NULL,
    state VARCHAR(16) NOT NULL,
    attempts_count INTEGER DEFAULT 0 NOT NULL,
    deliveries_count INTEGER DEFAULT 0 NOT NULL,
    publish_count INTEGER DEFAULT 1 NOT NULL,
    origin_id INTEGER,
    created_at BIGINT NOT NULL,
    next_attempt_at BIGINT NOT NULL,
    expires_at BIGINT,
    first_attempt_at BIGINT,
    last_attempt_at BIGINT,
    acquired_at BIGINT,
    last_error TEXT,
    hops SMALLINT DEFAULT 0 NOT NULL,
    policy_key VARCHAR(255),
    archived_at BIGINT DEFAULT (CAST(ROUND((julianday('now') - 2440587.5) * 86400000.0) AS INTEGER) * 1000) NOT NULL,
    reason VARCHAR(255),
    related_id INTEGER,
    error_fingerprint VARCHAR(16),
    PRIMARY KEY (id),
    CONSTRAINT message_archive_state_check CHECK (state IN ('COMPLETED', 'FAILED', 'DISCARDED'))
);

CREATE INDEX message_archive_archived ON message_archive (archived_at, id);

CREATE INDEX message_archive_queue ON message_archive (queue, archived_at);

CREATE INDEX message_archive_uncompleted ON message_archive (state, archived_at, id) WHERE state <> 'COMPLETED';

CREATE TABLE message_policy_state (
    scope VARCHAR(300) NOT NULL,
    "key" VARCHAR(255) NOT NULL,
    created_at BIGINT DEFAULT (CAST(ROUND((julianday('now') - 2440587.5) * 86400000.0) AS INTEGER) * 1000) NOT NULL,
    lease_token CHAR(32),
    lease_expires_at BIGINT,
    info JSON,
    expires_at BIGINT,
    counter BIGINT DEFAULT 0 NOT NULL,
    due_at BIGINT,
    PRIMARY KEY (scope, "key")
);

CREATE INDEX message_policy_state_due ON message_policy_state (scope, due_at) WHERE due_at IS NOT NULL;

CREATE INDEX message_policy_state_expiry ON message_policy_state (expires_at) WHERE expires_at IS NOT NULL;

INSERT INTO message_schema_version (version_num) VALUES ('0001') RETURNING version_num;

