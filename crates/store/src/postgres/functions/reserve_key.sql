-- Keeps: one attempt runs at a time per key, and one answer is stored. The insert decides the race
-- for a new key. An expired key goes to the caller that updates it from exactly the state it read.
-- If a row changed between two statements, it is read again, because only the stored row counts.
-- The row is read before the insert, because an insert would wait for a user's transaction that is
-- about to finish the key.
CREATE OR REPLACE FUNCTION hapax.reserve_key(
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
        -- The current time is used, not that of the statement, which may have waited for a lock.
        at := coalesce(reserve_key.now_at, clock_timestamp());
        -- An abandoned key has a row, and counts as new.
        IF reserve_key.owner IS NOT NULL AND coalesce(r.attempt, 0) = 0
            AND NOT hapax.has_room(reserve_key.owner, reserve_key.max_keys, reserve_key.max_bytes,
                                   true)
        THEN
            -- A copy of the request may have taken the last place in between: then the key is
            -- known.
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
