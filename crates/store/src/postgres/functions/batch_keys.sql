-- Keeps: many reservations and answers of Idempotency-Keys in one commit, each decided as if it came alone.
-- Answers are written first, because retries of the same key may wait for them. n: the number of the act,
-- counted from 1, answers before reservations. kept: the answer was stored under its fence. outcome: as in
-- hapax.reserve_key, or 'later' for a stored answer beyond `bytes_max`, which is read alone. A key
-- that another transaction has locked fails the batch after `lock_ms`.
--
-- While all callers are far from their quotas, the batch takes three statements: answers, new keys,
-- replays. Acts that none of these decides, and all acts of a caller close to its quota, are decided
-- one by one.
CREATE OR REPLACE FUNCTION hapax.batch_keys(
    answers hapax.key_answer[], asks hapax.key_ask[], instead hapax.key_answer, bytes_max bigint,
    lock_ms integer, now_at timestamptz
) RETURNS TABLE (n integer, kept boolean, outcome text, fence bigint, attempt integer,
                 remaining_us bigint, status integer, headers text, body bytea)
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
#variable_conflict use_column
DECLARE
    before CONSTANT integer := cardinality(answers);
    is_ample CONSTANT boolean := hapax.has_ample_room(answers, asks);
    a record;
    r record;
    at timestamptz;
    floor_now bigint;
    places bigint[];
    fences bigint[];
    came bigint[];
    replayed bigint[] := '{}';
    held bigint := 0;
BEGIN
    PERFORM set_config('lock_timeout', batch_keys.lock_ms::text, true);
    IF is_ample AND before > 0 THEN
        -- In the order of the array: of two answers under one fence, the first is kept.
        WITH written AS (
            UPDATE hapax.reservation x
            SET status = u.status, headers = coalesce(u.headers, '{}'), body = coalesce(u.body, ''),
                bytes = u.size, expires_at = coalesce(now_at, statement_timestamp()) + x.ttl
            FROM unnest(answers) WITH ORDINALITY AS u (
                scope, key, fence, status, headers, body, size, owner, max_keys, max_bytes, place)
            WHERE x.scope = u.scope AND x.key = u.key AND x.fence = u.fence AND x.status IS NULL
            RETURNING u.place
        )
        SELECT coalesce(array_agg(w.place), '{}') INTO places FROM written w;
        RETURN QUERY
        SELECT p, p = ANY (places), NULL::text, NULL::bigint, NULL::integer, NULL::bigint, NULL::integer,
               NULL::text, NULL::bytea
        FROM generate_series(1, before) AS p;
    ELSE
        FOR a IN
            SELECT * FROM unnest(answers) WITH ORDINALITY AS u (
                scope, key, fence, status, headers, body, size, owner, max_keys, max_bytes, place)
        LOOP
            batch_keys.n := a.place;
            IF a.owner IS NULL OR hapax.has_room(a.owner, a.max_keys, a.max_bytes, false) THEN
                batch_keys.kept := hapax.finish_key(a.scope, a.key, a.fence, a.status, a.headers, a.body,
                                                    batch_keys.now_at, a.size);
            ELSE
                batch_keys.kept := hapax.finish_key(a.scope, a.key, a.fence, instead.status,
                                                    instead.headers, instead.body, batch_keys.now_at,
                                                    instead.size);
            END IF;
            RETURN NEXT;
        END LOOP;
    END IF;
    IF cardinality(asks) = 0 THEN
        RETURN;
    END IF;
    batch_keys.kept := NULL;
    places := '{}';
    IF is_ample THEN
        -- A key without a row is probably new. The row is read first, because an insert would wait for
        -- a transaction in which a user is about to finish. The current time is used, not that of the
        -- statement, which may have waited for a lock.
        at := coalesce(now_at, clock_timestamp());
        floor_now := hapax.fence_floor(at);
        fences := ARRAY(
            SELECT CASE WHEN (SELECT true FROM hapax.reservation x
                              WHERE x.scope = u.scope AND x.key = u.key) IS NULL
                        THEN hapax.next_fence(floor_now) END
            FROM unnest(asks) WITH ORDINALITY AS u (
                scope, key, fingerprint, lease_us, ttl_us, owner, max_keys, max_bytes, place)
            ORDER BY u.place);
        IF array_remove(fences, NULL) <> '{}' THEN
            WITH came AS (
                INSERT INTO hapax.reservation AS x
                    (scope, key, fingerprint, fence, owner, leased_until, ttl, expires_at)
                SELECT u.scope, u.key, u.fingerprint, u.fence, u.owner,
                       at + u.lease_us * interval '1 microsecond', u.ttl_us * interval '1 microsecond',
                       at + u.ttl_us * interval '1 microsecond'
                FROM ROWS FROM (unnest(asks), unnest(fences)) AS u (
                    scope, key, fingerprint, lease_us, ttl_us, owner, max_keys, max_bytes, fence)
                WHERE u.fence IS NOT NULL
                ON CONFLICT DO NOTHING
                RETURNING x.fence
            )
            SELECT array_agg(c.fence) INTO came FROM came c;
            RETURN QUERY
            SELECT (before + u.place)::integer, NULL::boolean, 'fresh', u.fence, 1, NULL::bigint,
                   NULL::integer, NULL::text, NULL::bytea
            FROM unnest(fences) WITH ORDINALITY AS u (fence, place) WHERE u.fence = ANY (came);
            places := ARRAY(
                SELECT u.place FROM unnest(fences) WITH ORDINALITY AS u (fence, place)
                WHERE u.fence = ANY (came));
        END IF;
        IF cardinality(places) < cardinality(asks) THEN
            FOR a IN
                SELECT u.place, x.status, x.headers, x.body
                FROM unnest(asks) WITH ORDINALITY AS u (
                    scope, key, fingerprint, lease_us, ttl_us, owner, max_keys, max_bytes, place)
                JOIN hapax.reservation x ON x.scope = u.scope AND x.key = u.key
                WHERE x.expires_at > at AND x.fingerprint = u.fingerprint AND x.status IS NOT NULL
            LOOP
                batch_keys.n := before + a.place;
                batch_keys.outcome := 'replay';
                batch_keys.status := a.status;
                batch_keys.headers := a.headers::text;
                batch_keys.body := a.body;
                IF held > bytes_max THEN
                    batch_keys.outcome := 'later';
                    batch_keys.body := NULL;
                END IF;
                held := held + octet_length(a.body);
                replayed := replayed || a.place;
                RETURN NEXT;
            END LOOP;
            places := places || replayed;
        END IF;
    END IF;
    IF cardinality(places) = cardinality(asks) THEN
        RETURN;
    END IF;
    FOR a IN
        SELECT * FROM unnest(asks) WITH ORDINALITY AS u (
            scope, key, fingerprint, lease_us, ttl_us, owner, max_keys, max_bytes, place)
        WHERE u.place <> ALL (places)
    LOOP
        SELECT k.* INTO r FROM hapax.reserve_key(
            a.scope, a.key, a.fingerprint, a.lease_us * interval '1 microsecond',
            a.ttl_us * interval '1 microsecond', batch_keys.now_at, a.owner, a.max_keys,
            a.max_bytes) k;
        batch_keys.n := before + a.place;
        batch_keys.outcome := r.outcome;
        batch_keys.fence := r.fence;
        batch_keys.attempt := r.attempt;
        batch_keys.remaining_us := (extract(epoch FROM r.remaining) * 1000000)::bigint;
        batch_keys.status := r.status;
        batch_keys.headers := r.headers::text;
        batch_keys.body := r.body;
        IF r.body IS NOT NULL THEN
            IF held > bytes_max THEN
                batch_keys.outcome := 'later';
                batch_keys.body := NULL;
            END IF;
            held := held + octet_length(r.body);
        END IF;
        RETURN NEXT;
    END LOOP;
END $$;
