-- Idempotency-Keys as a node of ours needs them: which attempt it is, how long a lease still runs, and
-- the time of whoever asks. The functions that users call say what they said before.

-- How often the key was reserved without an answer.
ALTER TABLE hapax.reservation ADD COLUMN attempt integer NOT NULL DEFAULT 1;

-- Keeps: one runs at a time per key, and one answer. The insert decides the race for a new key; one whose
-- time is over goes to whoever moves it on from the very state it was seen in. Whatever changed between
-- two statements is looked at again: only what stands there is an answer. It is looked at first, because
-- an insert would wait for a transaction in which a user is about to finish.
CREATE FUNCTION hapax.reserve_key(
    scope text, key text, fingerprint bytea, lease interval, ttl interval,
    now_at timestamptz DEFAULT NULL)
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
        -- Not the statement's own time: it may have waited for somebody.
        at := coalesce(reserve_key.now_at, clock_timestamp());
        IF r.key IS NULL THEN
            INSERT INTO hapax.reservation AS x
                (scope, key, fingerprint, fence, leased_until, ttl, expires_at)
            VALUES (reserve_key.scope, reserve_key.key, reserve_key.fingerprint,
                    hapax.first_fence(at),
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
                expires_at = at + reserve_key.ttl, status = NULL, headers = NULL, body = NULL
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

-- Keeps: one answer per fence. False where the fence is lost, or was used.
CREATE FUNCTION hapax.finish_key(
    scope text, key text, fence bigint, status integer, headers jsonb, body bytea,
    now_at timestamptz DEFAULT NULL)
RETURNS boolean
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
#variable_conflict use_column
BEGIN
    UPDATE hapax.reservation x
    SET status = finish_key.status, headers = coalesce(finish_key.headers, '{}'),
        body = coalesce(finish_key.body, ''),
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
                  HINT = 'Somebody else has it, or had: roll back what you did for it.';
    END IF;
END $$;

-- Keeps: what an earlier attempt may have done. Nothing was done under this fence, so the key is free; one
-- that was reserved before goes back to how that attempt left it, under a fence that nobody has.
CREATE OR REPLACE FUNCTION hapax.abandon(scope text, key text, fence bigint) RETURNS void
LANGUAGE sql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
    UPDATE hapax.reservation x
    SET attempt = x.attempt - 1, leased_until = '-infinity', fence = hapax.next_fence(x.fence),
        -- Its row goes with the next pruning; until then a new fence is larger than this one.
        expires_at = CASE WHEN x.attempt = 1 THEN '-infinity' ELSE x.expires_at END
    WHERE x.scope = abandon.scope AND x.key = abandon.key AND x.fence = abandon.fence
      AND x.status IS NULL;
$$;

-- Whether a key still waits for the answer of this fence.
CREATE FUNCTION hapax.is_reserved(of_scope text, of_key text, of_fence bigint) RETURNS boolean
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp AS $$
    SELECT EXISTS (SELECT FROM hapax.reservation x
                   WHERE x.scope = of_scope AND x.key = of_key AND x.fence = of_fence
                     AND x.status IS NULL);
$$;

-- Nobody calls these but us, and the functions above.
REVOKE ALL ON FUNCTION
    hapax.is_reserved(text, text, bigint),
    hapax.reserve_key(text, text, bytea, interval, interval, timestamptz),
    hapax.finish_key(text, text, bigint, integer, jsonb, bytea, timestamptz)
    FROM PUBLIC;
