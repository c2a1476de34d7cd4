-- Keeps: one attempt runs at a time per key, and one answer is stored. outcome: fresh: the caller
-- runs the work, under `fence`; replay: the answer is stored, and returned; mismatch: the key was
-- used with another request, even if that request still runs; in_progress: another attempt runs, at
-- most until its lease ends.
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
