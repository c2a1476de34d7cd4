-- Functions that users call inside their own transactions, in any language. A role needs only
--     GRANT EXECUTE ON FUNCTION hapax.complete(uuid, bigint, text) TO app;
-- and so on for each function that it is to call. hapax.once has its own file.
--
-- They hold only the rows that they are about until the caller commits: one job, the mark of its
-- resource, one key.

-- Keeps: effects are committed only if the fence still holds, and once per fence. Messages that the
-- same transaction publishes, before or after, are listed with the event.
CREATE FUNCTION hapax.complete(job uuid, fence bigint, result text DEFAULT NULL) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    IF complete.job IS NULL OR complete.fence IS NULL THEN
        RAISE EXCEPTION 'hapax.complete: job and fence must not be null'
            USING ERRCODE = 'null_value_not_allowed';
    END IF;
    CASE hapax.done(complete.job, complete.fence, complete.result, statement_timestamp())
        WHEN 1, 3 THEN
            PERFORM hapax.adopt(complete.job);
        WHEN 2 THEN
            RAISE EXCEPTION 'job % was completed before under fence %', complete.job, complete.fence
                USING ERRCODE = 'XH001';
        ELSE
            RAISE EXCEPTION 'job % is not held under fence % any more', complete.job, complete.fence
                USING ERRCODE = 'XH001',
                      HINT = 'Another worker has the job, or had: roll back what you did for it.';
    END CASE;
END $$;

-- A verdict: one step of the job's schedule, or exactly `retry_in`.
CREATE FUNCTION hapax.fail(job uuid, fence bigint, error text, retry_in interval DEFAULT NULL)
RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    IF fail.job IS NULL OR fail.fence IS NULL THEN
        RAISE EXCEPTION 'hapax.fail: job and fence must not be null'
            USING ERRCODE = 'null_value_not_allowed';
    ELSIF fail.retry_in < interval '0' OR fail.retry_in > interval '1 year' THEN
        RAISE EXCEPTION 'hapax.fail: retry_in must be between 0 and a year'
            USING ERRCODE = 'invalid_parameter_value';
    END IF;
    IF hapax.failed(
        fail.job, fail.fence, coalesce(fail.error, 'failed'),
        CASE WHEN fail.retry_in IS NULL THEN 0 ELSE 2 END,
        coalesce(extract(epoch FROM fail.retry_in) * 1000000, 0)::bigint, random()) = 0
    THEN
        RAISE EXCEPTION 'job % is not held under fence % any more', fail.job, fail.fence
            USING ERRCODE = 'XH001';
    END IF;
END $$;

-- Keeps: the outbox is the caller's commit. The same id twice is one message. A keyed publish locks
-- its key until then: publish last, keys sorted. The id of the message.
CREATE FUNCTION hapax.publish(
    type text, data jsonb, key text DEFAULT NULL, tenant text DEFAULT 'default',
    id text DEFAULT NULL, api_version text DEFAULT NULL)
RETURNS text
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    IF publish.type IS NULL OR publish.data IS NULL OR publish.tenant IS NULL THEN
        RAISE EXCEPTION 'hapax.publish: type, data and tenant must not be null'
            USING ERRCODE = 'null_value_not_allowed';
    ELSIF publish.type = '' OR publish.id = '' THEN
        RAISE EXCEPTION 'hapax.publish: type and id must not be empty'
            USING ERRCODE = 'invalid_parameter_value';
    ELSIF greatest(octet_length(publish.type), octet_length(publish.key), octet_length(publish.id),
                   octet_length(publish.tenant), octet_length(publish.api_version)) > 255
    THEN
        RAISE EXCEPTION 'hapax.publish: at most 255 bytes of type, key, tenant, id and api_version'
            USING ERRCODE = 'string_data_right_truncation';
    ELSIF octet_length(publish.data::text) > 1048576 THEN
        RAISE EXCEPTION 'hapax.publish: at most 1 MiB of data'
            USING ERRCODE = 'program_limit_exceeded';
    END IF;
    RETURN hapax.write_message(
        publish.tenant, coalesce(publish.id, 'msg_' || replace(gen_random_uuid()::text, '-', '')),
        publish.type, publish.data, publish.key, publish.api_version,
        hapax.worked_for(), statement_timestamp());
END $$;

-- Idempotency-Keys: reserved, then finished with an answer, or abandoned. A fence is not guessable, and
-- larger than the one before it: by the row while the key is kept, and after that by the time.
CREATE TABLE hapax.reservation (
    scope        text        NOT NULL,
    key          text        NOT NULL,
    fingerprint  bytea       NOT NULL,
    fence        bigint      NOT NULL,
    leased_until timestamptz NOT NULL,
    ttl          interval    NOT NULL,
    expires_at   timestamptz NOT NULL,
    status       integer,
    headers      jsonb,
    body         bytea,
    PRIMARY KEY (scope, key)
);
CREATE INDEX reservation_expiry ON hapax.reservation (expires_at);

-- Where the fences of a key begin that is not there: a random number within three days of the time.
CREATE FUNCTION hapax.first_fence(at timestamptz) RETURNS bigint
LANGUAGE sql VOLATILE AS $$
    SELECT hapax.next_fence(
        greatest(pg_catalog.date_part('epoch', at)::bigint - 1704067200, 0) << 22);
$$;

-- Keeps: one attempt runs at a time per key, and one answer is stored. fresh: the caller runs the
-- work, under `fence`; replay: the stored answer; in_progress: another attempt runs, at most until
-- its lease ends; mismatch: the key was used with another request, which wins over in_progress.
CREATE FUNCTION hapax.reserve(
    scope text, key text, fingerprint bytea, lease interval DEFAULT '60s',
    ttl interval DEFAULT '72h')
RETURNS TABLE (outcome text, fence bigint, status integer, headers jsonb, body bytea)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
#variable_conflict use_column
DECLARE
    at CONSTANT timestamptz := statement_timestamp();
    r hapax.reservation;
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
    INSERT INTO hapax.reservation AS x
        (scope, key, fingerprint, fence, leased_until, ttl, expires_at)
    VALUES (reserve.scope, reserve.key, reserve.fingerprint, hapax.first_fence(at),
            at + reserve.lease, reserve.ttl, at + reserve.ttl)
    ON CONFLICT DO NOTHING
    RETURNING x.* INTO r;
    IF FOUND THEN
        RETURN QUERY SELECT 'fresh', r.fence, NULL::integer, NULL::jsonb, NULL::bytea;
        RETURN;
    END IF;
    SELECT x.* INTO r FROM hapax.reservation x
    WHERE x.scope = reserve.scope AND x.key = reserve.key
    FOR UPDATE;
    IF NOT FOUND THEN
        -- It was abandoned between the two statements: the next call gets it.
        RETURN QUERY SELECT 'in_progress', NULL::bigint, NULL::integer, NULL::jsonb, NULL::bytea;
    ELSIF r.expires_at > at AND r.fingerprint <> reserve.fingerprint THEN
        RETURN QUERY SELECT 'mismatch', NULL::bigint, NULL::integer, NULL::jsonb, NULL::bytea;
    ELSIF r.expires_at > at AND r.status IS NOT NULL THEN
        RETURN QUERY SELECT 'replay', NULL::bigint, r.status, r.headers, r.body;
    ELSIF r.status IS NULL AND r.leased_until > at THEN
        RETURN QUERY SELECT 'in_progress', NULL::bigint, NULL::integer, NULL::jsonb, NULL::bytea;
    ELSE
        RETURN QUERY
        UPDATE hapax.reservation x
        SET fingerprint = reserve.fingerprint, fence = hapax.next_fence(x.fence),
            leased_until = at + reserve.lease, ttl = reserve.ttl, expires_at = at + reserve.ttl,
            status = NULL, headers = NULL, body = NULL
        WHERE x.scope = reserve.scope AND x.key = reserve.key
        RETURNING 'fresh', x.fence, NULL::integer, NULL::jsonb, NULL::bytea;
    END IF;
END $$;

-- Keeps: one answer per fence. A second call raises, so that effects repeated beside it roll back.
-- The answer is bounded: it is kept for the whole ttl, and read back at once.
CREATE FUNCTION hapax.finish(
    scope text, key text, fence bigint, status integer, headers jsonb, body bytea)
RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
#variable_conflict use_column
BEGIN
    IF finish.scope IS NULL OR finish.key IS NULL OR finish.fence IS NULL OR finish.status IS NULL THEN
        RAISE EXCEPTION 'hapax.finish: scope, key, fence and status must not be null'
            USING ERRCODE = 'null_value_not_allowed';
    ELSIF finish.status NOT BETWEEN 100 AND 599 THEN
        RAISE EXCEPTION 'hapax.finish: % is no status', finish.status
            USING ERRCODE = 'invalid_parameter_value';
    ELSIF octet_length(finish.body) > 1048576 OR octet_length(finish.headers::text) > 65536 THEN
        RAISE EXCEPTION 'hapax.finish: at most 1 MiB of body and 64 KiB of headers'
            USING ERRCODE = 'program_limit_exceeded',
                  HINT = 'Store a reference to it, and let the replay fetch it.';
    END IF;
    UPDATE hapax.reservation x
    SET status = finish.status, headers = coalesce(finish.headers, '{}'),
        body = coalesce(finish.body, ''), expires_at = statement_timestamp() + x.ttl
    WHERE x.scope = finish.scope AND x.key = finish.key AND x.fence = finish.fence
      AND x.status IS NULL;
    IF NOT FOUND THEN
        RAISE EXCEPTION 'the key is not reserved under fence % any more, or is finished', finish.fence
            USING ERRCODE = 'XH001',
                  HINT = 'Another caller has it, or had: roll back what you did for it.';
    END IF;
END $$;

-- Nothing was done for it: the key is free. Under a fence that is lost there is nothing to give up.
CREATE FUNCTION hapax.abandon(scope text, key text, fence bigint) RETURNS void
LANGUAGE sql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
    DELETE FROM hapax.reservation x
    WHERE x.scope = abandon.scope AND x.key = abandon.key AND x.fence = abandon.fence
      AND x.status IS NULL;
$$;
