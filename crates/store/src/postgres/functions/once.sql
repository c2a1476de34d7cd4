-- Keeps: one effect per (tenant, scope, key). The primary key decides the race, inside the caller's
-- own transaction. The loser waits for the winner's commit and gets "false"; if the winner rolls
-- back, the loser wins.
CREATE OR REPLACE FUNCTION hapax.once(scope text, key text, tenant text DEFAULT 'default')
RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
#variable_conflict use_column
BEGIN
    IF once.scope IS NULL OR once.key IS NULL OR once.tenant IS NULL THEN
        RAISE EXCEPTION 'hapax.once: scope, key and tenant must not be null'
            USING ERRCODE = 'null_value_not_allowed';
    ELSIF once.key = '' THEN
        RAISE EXCEPTION 'hapax.once: the key is empty' USING ERRCODE = 'invalid_parameter_value';
    ELSIF octet_length(once.scope) > 255 OR octet_length(once.tenant) > 255
        OR octet_length(once.key) > 1000
    THEN
        RAISE EXCEPTION 'hapax.once: at most 255 bytes of scope and tenant, and 1000 of key'
            USING ERRCODE = 'string_data_right_truncation';
    END IF;
    INSERT INTO hapax.once_key (tenant, scope, key) VALUES (once.tenant, once.scope, once.key)
    ON CONFLICT DO NOTHING;
    RETURN FOUND;
END $$;

-- Only roles with an explicit grant may call it, and they need no other right:
--     GRANT EXECUTE ON FUNCTION hapax.once(text, text, text) TO app;
REVOKE ALL ON FUNCTION hapax.once(text, text, text) FROM PUBLIC;
