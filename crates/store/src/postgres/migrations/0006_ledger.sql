-- Idempotency-Keys as a Hapax node needs them: the number of the attempt, how long a lease still
-- runs, and the caller's time. The functions that users call keep their behaviour.

-- attempt: how often the key was reserved without an answer. owner: the caller that it counts for
-- ('api/acct_1'), null where no quota holds. bytes: the size of the answer.
ALTER TABLE hapax.reservation
    ADD COLUMN attempt integer NOT NULL DEFAULT 1,
    ADD COLUMN owner   text,
    ADD COLUMN bytes   bigint NOT NULL DEFAULT 0;

-- The usage of each caller, and of each API ('api', without a slash), so that checking a quota
-- needs no count. The triggers below update it in the same statement that changes a reservation:
-- nothing can be missed or counted twice. The usage of an owner is the sum over its rows. There is
-- one row for each transaction that counts for it at the same time, so that none ever waits for
-- another here, least of all for a user's transaction that stays open. callers: how many owners an
-- API has; such an owner has a row 0.
CREATE TABLE hapax.key_usage (
    owner   text   NOT NULL,
    slot    bigint NOT NULL,
    keys    bigint NOT NULL,
    bytes   bigint NOT NULL,
    callers bigint NOT NULL,
    PRIMARY KEY (owner, slot)
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 2000);
-- The rows to be folded.
CREATE INDEX key_usage_apart ON hapax.key_usage (owner) WHERE slot <> 0;
CREATE SEQUENCE hapax.key_usage_slot;

-- Counts on some row of the owner that is free. 1 where the owner was not there before, -1 where it is gone
-- now, else 0.
CREATE FUNCTION hapax.count_usage(owner text, keys bigint, bytes bigint, callers bigint)
RETURNS integer
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
#variable_conflict use_column
DECLARE
    free bigint;
    is_zero boolean;
BEGIN
    -- Under a stricter isolation a row that another transaction has changed cannot be written.
    IF current_setting('transaction_isolation') = 'read committed' THEN
        SELECT u.slot INTO free FROM hapax.key_usage u WHERE u.owner = count_usage.owner
        ORDER BY u.slot LIMIT 1 FOR UPDATE SKIP LOCKED;
        IF free IS NOT NULL THEN
            UPDATE hapax.key_usage u
            SET keys = u.keys + count_usage.keys, bytes = u.bytes + count_usage.bytes,
                callers = u.callers + count_usage.callers
            WHERE u.owner = count_usage.owner AND u.slot = free
            RETURNING u.keys = 0 AND u.bytes = 0 AND u.callers = 0 INTO is_zero;
            IF NOT is_zero OR free = 0 AND EXISTS (
                SELECT FROM hapax.key_usage u WHERE u.owner = count_usage.owner AND u.slot <> 0)
            THEN
                RETURN 0;
            END IF;
            DELETE FROM hapax.key_usage u WHERE u.owner = count_usage.owner AND u.slot = free;
            RETURN CASE WHEN free = 0 THEN -1 ELSE 0 END;
        END IF;
        IF NOT EXISTS (SELECT FROM hapax.key_usage u WHERE u.owner = count_usage.owner) THEN
            INSERT INTO hapax.key_usage AS u (owner, slot, keys, bytes, callers)
            VALUES (count_usage.owner, 0, count_usage.keys, count_usage.bytes, count_usage.callers)
            ON CONFLICT DO NOTHING;
            IF FOUND THEN
                RETURN 1;
            END IF;
        END IF;
    END IF;
    INSERT INTO hapax.key_usage (owner, slot, keys, bytes, callers)
    VALUES (count_usage.owner, nextval('hapax.key_usage_slot'), count_usage.keys, count_usage.bytes,
            count_usage.callers);
    RETURN 0;
END $$;

-- Counts for a caller and for its API.
CREATE FUNCTION hapax.count_keys(owner text, keys bigint, bytes bigint) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    callers CONSTANT bigint := hapax.count_usage(owner, keys, bytes, 0);
BEGIN
    PERFORM hapax.count_usage(split_part(owner, '/', 1), keys, bytes, callers);
END $$;

CREATE FUNCTION hapax.reservation_came() RETURNS trigger
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    PERFORM hapax.count_keys(NEW.owner, 1, NEW.bytes);
    RETURN NULL;
END $$;
CREATE TRIGGER reservation_came AFTER INSERT ON hapax.reservation
FOR EACH ROW WHEN (NEW.owner IS NOT NULL) EXECUTE FUNCTION hapax.reservation_came();

CREATE FUNCTION hapax.reservation_changed() RETURNS trigger
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    IF NEW.owner IS NOT DISTINCT FROM OLD.owner THEN
        PERFORM hapax.count_keys(NEW.owner, 0, NEW.bytes - OLD.bytes);
        RETURN NULL;
    END IF;
    IF OLD.owner IS NOT NULL THEN
        PERFORM hapax.count_keys(OLD.owner, -1, -OLD.bytes);
    END IF;
    IF NEW.owner IS NOT NULL THEN
        PERFORM hapax.count_keys(NEW.owner, 1, NEW.bytes);
    END IF;
    RETURN NULL;
END $$;
CREATE TRIGGER reservation_changed AFTER UPDATE ON hapax.reservation
FOR EACH ROW WHEN (NEW.owner IS DISTINCT FROM OLD.owner
                   OR NEW.owner IS NOT NULL AND NEW.bytes <> OLD.bytes)
EXECUTE FUNCTION hapax.reservation_changed();

-- Many at once, when the janitor forgets them.
CREATE FUNCTION hapax.reservation_went() RETURNS trigger
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    PERFORM hapax.count_keys(g.owner, -count(*), -sum(g.bytes)::bigint)
    FROM gone g WHERE g.owner IS NOT NULL GROUP BY g.owner;
    RETURN NULL;
END $$;
CREATE TRIGGER reservation_went AFTER DELETE ON hapax.reservation
REFERENCING OLD TABLE AS gone
FOR EACH STATEMENT EXECUTE FUNCTION hapax.reservation_went();

-- Keeps: the sums. Makes one row of those that an owner has and that are free.
CREATE FUNCTION hapax.fold_usage(owner text) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
#variable_conflict use_column
DECLARE
    held record;
    came integer;
BEGIN
    SELECT array_agg(h.slot) AS slots, sum(h.keys)::bigint AS keys, sum(h.bytes)::bigint AS bytes,
           sum(h.callers)::bigint AS callers
    INTO held
    FROM (SELECT u.* FROM hapax.key_usage u WHERE u.owner = fold_usage.owner AND u.slot <> 0
          ORDER BY u.slot FOR UPDATE SKIP LOCKED) h;
    IF held.slots IS NULL THEN
        RETURN;
    END IF;
    DELETE FROM hapax.key_usage u WHERE u.owner = fold_usage.owner AND u.slot = ANY (held.slots);
    came := hapax.count_usage(fold_usage.owner, held.keys, held.bytes, held.callers);
    -- Its row 0 was missing, or is not needed any more. An API is no caller.
    IF came <> 0 AND position('/' IN fold_usage.owner) > 0 THEN
        PERFORM hapax.count_usage(split_part(fold_usage.owner, '/', 1), 0, 0, came);
    END IF;
END $$;

-- Folds the rows that were left apart; the janitor calls it.
CREATE FUNCTION hapax.tend_usage() RETURNS void
LANGUAGE sql SET search_path = pg_catalog, pg_temp AS $$
    SELECT hapax.fold_usage(x.owner)
    FROM (SELECT DISTINCT u.owner FROM hapax.key_usage u WHERE u.slot <> 0 LIMIT 1000) x;
$$;

-- Whether a caller has room: for another key, or (with of_keys false) for an answer. Callers of an API
-- together may have 16 times as much as one; beyond that each has its fair share. Close to its own
-- quota a caller's requests are decided one after the other, under a lock that ends with the statement.
CREATE FUNCTION hapax.has_room(owner text, max_keys bigint, max_bytes bigint, of_keys boolean)
RETURNS boolean
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
#variable_conflict use_column
DECLARE
    -- More than the transactions that are under way at once take.
    margin_keys CONSTANT bigint := 1000;
    margin_bytes CONSTANT bigint := least(64 * 1048576, has_room.max_bytes / 2);
    own record;
    api record;
    callers numeric;
BEGIN
    FOR round IN 1 .. 2 LOOP
        SELECT coalesce(sum(u.keys), 0)::bigint AS keys, coalesce(sum(u.bytes), 0)::bigint AS bytes,
               count(*) AS slots
        INTO own FROM hapax.key_usage u WHERE u.owner = has_room.owner;
        EXIT WHEN own.keys < max_keys - margin_keys AND own.bytes < max_bytes - margin_bytes;
        IF round = 1 THEN
            PERFORM pg_advisory_xact_lock(1751216225, hashtext(has_room.owner));
        END IF;
    END LOOP;
    SELECT coalesce(sum(u.keys), 0)::numeric AS keys, coalesce(sum(u.bytes), 0)::numeric AS bytes,
           coalesce(sum(u.callers), 0)::numeric AS callers, count(*) AS slots
    INTO api FROM hapax.key_usage u WHERE u.owner = split_part(has_room.owner, '/', 1);
    IF own.slots > 50 THEN
        PERFORM hapax.fold_usage(has_room.owner);
    END IF;
    IF api.slots > 50 THEN
        PERFORM hapax.fold_usage(split_part(has_room.owner, '/', 1));
    END IF;
    callers := greatest(api.callers + CASE WHEN own.slots = 0 THEN 1 ELSE 0 END, 1);
    RETURN own.bytes < max_bytes
        AND (api.bytes < 16 * max_bytes::numeric
             OR (own.bytes + 1) * callers <= 16 * max_bytes::numeric)
        AND (NOT of_keys
             OR own.keys < max_keys
                AND (api.keys < 16 * max_keys::numeric
                     OR (own.keys + 1) * callers <= 16 * max_keys::numeric));
END $$;

-- Keeps: one attempt runs at a time per key, and one answer is stored. The insert decides the race
-- for a new key. An expired key goes to the caller that updates it from exactly the state it read.
-- If a row changed between two statements, it is read again: only the stored row is an answer. The
-- row is read first, because an insert would wait for a transaction in which a user is about to
-- finish.
CREATE FUNCTION hapax.reserve_key(
    scope text, key text, fingerprint bytea, lease interval, ttl interval,
    now_at timestamptz DEFAULT NULL, owner text DEFAULT NULL, max_keys bigint DEFAULT NULL,
    max_bytes bigint DEFAULT NULL)
RETURNS TABLE (outcome text, fence bigint, attempt integer, remaining interval, status integer,
               headers jsonb, body bytea)
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
#variable_conflict use_column
DECLARE
    at timestamptz;
    r hapax.reservation;
BEGIN
    FOR round IN 1 .. 100 LOOP
        SELECT x.* INTO r FROM hapax.reservation x
        WHERE x.scope = reserve_key.scope AND x.key = reserve_key.key;
        -- Not the statement's own time: it may have waited for a lock.
        at := coalesce(reserve_key.now_at, clock_timestamp());
        -- A key that was abandoned has a row, and is as new as one without.
        IF reserve_key.owner IS NOT NULL AND coalesce(r.attempt, 0) = 0
            AND NOT hapax.has_room(reserve_key.owner, reserve_key.max_keys, reserve_key.max_bytes,
                                   true)
        THEN
            -- A copy that came in meanwhile has taken the last place: the key is known then.
            CONTINUE WHEN EXISTS (
                SELECT FROM hapax.reservation x
                WHERE x.scope = reserve_key.scope AND x.key = reserve_key.key AND x.attempt > 0);
            RETURN QUERY SELECT 'over_quota', NULL::bigint, NULL::integer, NULL::interval,
                                NULL::integer, NULL::jsonb, NULL::bytea;
            RETURN;
        END IF;
        IF r.key IS NULL THEN
            INSERT INTO hapax.reservation AS x
                (scope, key, fingerprint, fence, owner, leased_until, ttl, expires_at)
            VALUES (reserve_key.scope, reserve_key.key, reserve_key.fingerprint,
                    hapax.first_fence(at), reserve_key.owner,
                    at + reserve_key.lease, reserve_key.ttl, at + reserve_key.ttl)
            ON CONFLICT DO NOTHING
            RETURNING x.* INTO r;
        ELSIF r.expires_at > at AND r.fingerprint <> reserve_key.fingerprint THEN
            RETURN QUERY SELECT 'mismatch', NULL::bigint, NULL::integer, NULL::interval,
                                NULL::integer, NULL::jsonb, NULL::bytea;
            RETURN;
        ELSIF r.expires_at > at AND r.status IS NOT NULL THEN
            RETURN QUERY SELECT 'replay', NULL::bigint, NULL::integer, NULL::interval, r.status,
                                r.headers, r.body;
            RETURN;
        ELSIF r.status IS NULL AND r.leased_until > at THEN
            RETURN QUERY SELECT 'in_progress', NULL::bigint, NULL::integer, r.leased_until - at,
                                NULL::integer, NULL::jsonb, NULL::bytea;
            RETURN;
        ELSE
            UPDATE hapax.reservation x
            SET fingerprint = reserve_key.fingerprint, fence = hapax.next_fence(x.fence),
                attempt = CASE WHEN x.status IS NULL THEN x.attempt + 1 ELSE 1 END,
                leased_until = at + reserve_key.lease, ttl = reserve_key.ttl,
                expires_at = at + reserve_key.ttl, status = NULL, headers = NULL, body = NULL,
                owner = reserve_key.owner, bytes = 0
            WHERE x.scope = reserve_key.scope AND x.key = reserve_key.key
              AND x.fence = r.fence AND x.status IS NOT DISTINCT FROM r.status
            RETURNING x.* INTO r;
        END IF;
        IF r.key IS NOT NULL THEN
            RETURN QUERY SELECT 'fresh', r.fence, r.attempt, NULL::interval, NULL::integer,
                                NULL::jsonb, NULL::bytea;
            RETURN;
        END IF;
    END LOOP;
    RAISE EXCEPTION 'the key changes hands all the time' USING ERRCODE = 'serialization_failure';
END $$;

CREATE OR REPLACE FUNCTION hapax.reserve(
    scope text, key text, fingerprint bytea, lease interval DEFAULT '60s',
    ttl interval DEFAULT '72h')
RETURNS TABLE (outcome text, fence bigint, status integer, headers jsonb, body bytea)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
#variable_conflict use_column
BEGIN
    IF reserve.scope IS NULL OR reserve.key IS NULL OR reserve.fingerprint IS NULL
        OR reserve.lease IS NULL OR reserve.ttl IS NULL
    THEN
        RAISE EXCEPTION 'hapax.reserve: nothing of it may be null'
            USING ERRCODE = 'null_value_not_allowed';
    ELSIF reserve.key = '' OR reserve.lease <= interval '0' OR reserve.lease > interval '1 day'
        OR reserve.ttl < reserve.lease OR reserve.ttl > interval '10 years'
    THEN
        RAISE EXCEPTION 'hapax.reserve: an empty key, a lease that is not within a day, or a ttl that '
            'is shorter than the lease or longer than ten years'
            USING ERRCODE = 'invalid_parameter_value';
    ELSIF octet_length(reserve.key) > 255 OR octet_length(reserve.scope) > 1000
        OR octet_length(reserve.fingerprint) > 255
    THEN
        RAISE EXCEPTION 'hapax.reserve: at most 255 bytes of key and fingerprint, and 1000 of scope'
            USING ERRCODE = 'string_data_right_truncation';
    END IF;
    RETURN QUERY
    SELECT k.outcome, k.fence, k.status, k.headers, k.body
    FROM hapax.reserve_key(reserve.scope, reserve.key, reserve.fingerprint, reserve.lease,
                           reserve.ttl) k;
END $$;

-- Keeps: one answer per fence. False where the fence is lost, or was used. The caller counts `size` bytes
-- for it.
CREATE FUNCTION hapax.finish_key(
    scope text, key text, fence bigint, status integer, headers jsonb, body bytea,
    now_at timestamptz DEFAULT NULL, size bigint DEFAULT NULL)
RETURNS boolean
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
#variable_conflict use_column
BEGIN
    UPDATE hapax.reservation x
    SET status = finish_key.status, headers = coalesce(finish_key.headers, '{}'),
        body = coalesce(finish_key.body, ''),
        bytes = coalesce(finish_key.size, octet_length(finish_key.headers::text), 0)
            + CASE WHEN finish_key.size IS NULL
                   THEN coalesce(octet_length(finish_key.body), 0) ELSE 0 END,
        expires_at = coalesce(finish_key.now_at, statement_timestamp()) + x.ttl
    WHERE x.scope = finish_key.scope AND x.key = finish_key.key AND x.fence = finish_key.fence
      AND x.status IS NULL;
    RETURN FOUND;
END $$;

-- A second call raises, so that effects repeated beside it roll back. The answer is bounded: it is kept
-- for the whole ttl, and read back at once.
CREATE OR REPLACE FUNCTION hapax.finish(
    scope text, key text, fence bigint, status integer, headers jsonb, body bytea)
RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    IF finish.scope IS NULL OR finish.key IS NULL OR finish.fence IS NULL OR finish.status IS NULL THEN
        RAISE EXCEPTION 'hapax.finish: scope, key, fence and status must not be null'
            USING ERRCODE = 'null_value_not_allowed';
    ELSIF finish.status NOT BETWEEN 200 AND 599 THEN
        RAISE EXCEPTION 'hapax.finish: % is no status', finish.status
            USING ERRCODE = 'invalid_parameter_value';
    ELSIF octet_length(finish.body) > 1048576 OR octet_length(finish.headers::text) > 65536 THEN
        RAISE EXCEPTION 'hapax.finish: at most 1 MiB of body and 64 KiB of headers'
            USING ERRCODE = 'program_limit_exceeded',
                  HINT = 'Store a reference to it, and let the replay fetch it.';
    END IF;
    IF NOT hapax.finish_key(finish.scope, finish.key, finish.fence, finish.status, finish.headers,
                            finish.body)
    THEN
        RAISE EXCEPTION 'the key is not reserved under fence % any more, or is finished', finish.fence
            USING ERRCODE = 'XH001',
                  HINT = 'Another caller has it, or had: roll back what you did for it.';
    END IF;
END $$;

-- Keeps: what an earlier attempt may have done. Nothing was done under this fence, so the key is
-- free. A key that was reserved before returns to how that attempt left it, under a fence that no
-- attempt holds.
CREATE OR REPLACE FUNCTION hapax.abandon(scope text, key text, fence bigint) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
#variable_conflict use_column
BEGIN
    UPDATE hapax.reservation x
    SET attempt = x.attempt - 1, leased_until = '-infinity', fence = hapax.next_fence(x.fence),
        -- Its row goes with the next pruning; until then a new fence is larger than this one.
        expires_at = CASE WHEN x.attempt = 1 THEN '-infinity' ELSE x.expires_at END,
        owner = CASE WHEN x.attempt = 1 THEN NULL ELSE x.owner END
    WHERE x.scope = abandon.scope AND x.key = abandon.key AND x.fence = abandon.fence
      AND x.status IS NULL;
END $$;

-- Whether a key still waits for the answer of this fence.
CREATE FUNCTION hapax.is_reserved(of_scope text, of_key text, of_fence bigint) RETURNS boolean
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp AS $$
    SELECT EXISTS (SELECT FROM hapax.reservation x
                   WHERE x.scope = of_scope AND x.key = of_key AND x.fence = of_fence
                     AND x.status IS NULL);
$$;

-- Only Hapax and the functions above call these.
REVOKE ALL ON FUNCTION
    hapax.is_reserved(text, text, bigint),
    hapax.reserve_key(text, text, bytea, interval, interval, timestamptz, text, bigint, bigint),
    hapax.finish_key(text, text, bigint, integer, jsonb, bytea, timestamptz, bigint),
    hapax.count_usage(text, bigint, bigint, bigint), hapax.count_keys(text, bigint, bigint),
    hapax.fold_usage(text), hapax.tend_usage(), hapax.has_room(text, bigint, bigint, boolean),
    hapax.reservation_came(), hapax.reservation_changed(), hapax.reservation_went()
    FROM PUBLIC;
