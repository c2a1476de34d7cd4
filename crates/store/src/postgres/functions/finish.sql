-- Stores the answer of a key. A second call raises an error, so that effects that are repeated with
-- it are rolled back. The answer is bounded, because it is stored for the whole TTL and read back at
-- once.
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
