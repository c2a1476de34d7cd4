-- Idempotency-Keys of a user's API: reserved, then finished with an answer, or abandoned.

-- expires_at is moved on by the answer, which is kept for the whole ttl; status is null until then.
-- owner (the caller, 'api/acct_1') and realm (the API, 'api') are null where no quota holds; bytes is the
-- size of the answer.
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
    owner        TEXT,
    realm        TEXT,
    bytes        INTEGER NOT NULL DEFAULT 0,
    UNIQUE (scope, key)
);
CREATE INDEX hapax_reservation_expiry ON hapax_reservation (expires_at);

-- reservation_fence: the highest that was ever given out, also of keys that are gone.
INSERT INTO hapax_meta (name, value) VALUES ('reservation_fence', 0);

-- The usage of each API and each of its callers, so that checking a quota needs no count. The
-- triggers below update it in the same statement as the rows themselves: nothing can be missed or
-- counted twice. A caller has a row as long as it has a key.
CREATE TABLE hapax_realm_usage (
    realm   TEXT    PRIMARY KEY,
    keys    INTEGER NOT NULL,
    bytes   INTEGER NOT NULL,
    callers INTEGER NOT NULL
) WITHOUT ROWID;
CREATE TABLE hapax_key_usage (
    owner TEXT    PRIMARY KEY,
    realm TEXT    NOT NULL,
    keys  INTEGER NOT NULL,
    bytes INTEGER NOT NULL
) WITHOUT ROWID;

CREATE TRIGGER hapax_key_usage_first AFTER INSERT ON hapax_key_usage BEGIN
    UPDATE hapax_realm_usage SET callers = callers + 1 WHERE realm = NEW.realm;
END;
CREATE TRIGGER hapax_key_usage_last AFTER DELETE ON hapax_key_usage BEGIN
    UPDATE hapax_realm_usage SET callers = callers - 1 WHERE realm = OLD.realm;
END;

CREATE TRIGGER hapax_reservation_came AFTER INSERT ON hapax_reservation
WHEN NEW.owner IS NOT NULL BEGIN
    INSERT INTO hapax_realm_usage (realm, keys, bytes, callers) VALUES (NEW.realm, 1, NEW.bytes, 0)
    ON CONFLICT (realm) DO UPDATE SET keys = keys + 1, bytes = bytes + excluded.bytes;
    INSERT INTO hapax_key_usage (owner, realm, keys, bytes) VALUES (NEW.owner, NEW.realm, 1, NEW.bytes)
    ON CONFLICT (owner) DO UPDATE SET keys = keys + 1, bytes = bytes + excluded.bytes;
END;
CREATE TRIGGER hapax_reservation_went AFTER DELETE ON hapax_reservation
WHEN OLD.owner IS NOT NULL BEGIN
    UPDATE hapax_key_usage SET keys = keys - 1, bytes = bytes - OLD.bytes WHERE owner = OLD.owner;
    DELETE FROM hapax_key_usage WHERE owner = OLD.owner AND keys = 0;
    UPDATE hapax_realm_usage SET keys = keys - 1, bytes = bytes - OLD.bytes WHERE realm = OLD.realm;
    DELETE FROM hapax_realm_usage WHERE realm = OLD.realm AND keys = 0;
END;
CREATE TRIGGER hapax_reservation_answered AFTER UPDATE OF bytes ON hapax_reservation
WHEN NEW.owner IS OLD.owner AND NEW.owner IS NOT NULL AND NEW.bytes <> OLD.bytes BEGIN
    UPDATE hapax_key_usage SET bytes = bytes - OLD.bytes + NEW.bytes WHERE owner = NEW.owner;
    UPDATE hapax_realm_usage SET bytes = bytes - OLD.bytes + NEW.bytes WHERE realm = NEW.realm;
END;
-- A quota was put on, or taken off, since the key was reserved first.
CREATE TRIGGER hapax_reservation_counted AFTER UPDATE OF owner ON hapax_reservation
WHEN NEW.owner IS NOT NULL AND OLD.owner IS NULL BEGIN
    INSERT INTO hapax_realm_usage (realm, keys, bytes, callers) VALUES (NEW.realm, 1, NEW.bytes, 0)
    ON CONFLICT (realm) DO UPDATE SET keys = keys + 1, bytes = bytes + excluded.bytes;
    INSERT INTO hapax_key_usage (owner, realm, keys, bytes) VALUES (NEW.owner, NEW.realm, 1, NEW.bytes)
    ON CONFLICT (owner) DO UPDATE SET keys = keys + 1, bytes = bytes + excluded.bytes;
END;
CREATE TRIGGER hapax_reservation_uncounted AFTER UPDATE OF owner ON hapax_reservation
WHEN NEW.owner IS NULL AND OLD.owner IS NOT NULL BEGIN
    UPDATE hapax_key_usage SET keys = keys - 1, bytes = bytes - OLD.bytes WHERE owner = OLD.owner;
    DELETE FROM hapax_key_usage WHERE owner = OLD.owner AND keys = 0;
    UPDATE hapax_realm_usage SET keys = keys - 1, bytes = bytes - OLD.bytes WHERE realm = OLD.realm;
    DELETE FROM hapax_realm_usage WHERE realm = OLD.realm AND keys = 0;
END;
