-- Keeps: one answer per fence. Returns false if the fence is lost or was used. `size` is the number
-- of bytes that count for the caller.
CREATE OR REPLACE FUNCTION hapax.finish_key(
    scope text, key text, fence bigint, status integer, headers jsonb, body bytea,
    now_at timestamptz DEFAULT NULL, size bigint DEFAULT NULL)
RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
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
