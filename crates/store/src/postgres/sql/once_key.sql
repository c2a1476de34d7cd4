-- The keys of hapax.once. The primary key decides the race.
--
-- This file and the function stand alone: they may be run as a migration in any PostgreSQL, with or
-- without Hapax.
CREATE SCHEMA IF NOT EXISTS hapax;
GRANT USAGE ON SCHEMA hapax TO PUBLIC;

CREATE TABLE IF NOT EXISTS hapax.once_key (
    tenant     text        NOT NULL,
    scope      text        NOT NULL,
    key        text        NOT NULL,
    at         timestamptz NOT NULL DEFAULT statement_timestamp(),
    -- From when the key may be deleted; null: never.
    expires_at timestamptz,
    PRIMARY KEY (tenant, scope, key)
);
CREATE INDEX IF NOT EXISTS once_key_expiry ON hapax.once_key (expires_at)
    WHERE expires_at IS NOT NULL;

