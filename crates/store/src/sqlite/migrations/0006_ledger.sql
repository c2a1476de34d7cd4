-- Idempotency-Keys of one's own API: reserved, then finished with an answer, or abandoned.

-- expires_at is moved on by the answer, which is kept for the whole ttl; status is null until then.
CREATE TABLE hapax_reservation (
    scope        TEXT    NOT NULL,
    key          TEXT    NOT NULL,
    fingerprint  BLOB    NOT NULL,
    fence        INTEGER NOT NULL,
    attempt      INTEGER NOT NULL,
    leased_until INTEGER NOT NULL,
    lease        INTEGER NOT NULL,
    ttl          INTEGER NOT NULL,
    expires_at   INTEGER NOT NULL,
    status       INTEGER,
    headers      TEXT,
    body         BLOB,
    UNIQUE (scope, key)
);
CREATE INDEX hapax_reservation_expiry ON hapax_reservation (expires_at);

-- reservation_fence: the highest that was ever given out, also of keys that are gone.
INSERT INTO hapax_meta (name, value) VALUES ('reservation_fence', 0);
