-- The first 16 bytes of a SHA-256 over length-prefixed parts, as hapax_core::KeyHash::of: the first part
-- is the kind.
CREATE OR REPLACE FUNCTION hapax.key_hash(VARIADIC parts bytea[]) RETURNS uuid
-- The function is not written in SQL: it would be parsed and planned at each call, which costs ten
-- times as much.
LANGUAGE plpgsql IMMUTABLE SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    part bytea;
    prefixed bytea := '';
BEGIN
    FOREACH part IN ARRAY parts LOOP
        prefixed := prefixed || int8send(octet_length(part)::bigint) || part;
    END LOOP;
    RETURN encode(substring(sha256(prefixed) FROM 1 FOR 16), 'hex')::uuid;
END $$;
