-- The first 16 bytes of a SHA-256 over length-prefixed parts, as hapax_core::KeyHash::of: the first part
-- is the kind.
CREATE OR REPLACE FUNCTION hapax.key_hash(VARIADIC parts bytea[]) RETURNS uuid
LANGUAGE sql IMMUTABLE SET search_path = pg_catalog, pg_temp AS $$
    SELECT encode(substring(sha256(
        string_agg(int8send(octet_length(p.part)::bigint) || p.part, ''::bytea ORDER BY p.n)
    ) FROM 1 FOR 16), 'hex')::uuid
    FROM unnest(parts) WITH ORDINALITY p (part, n);
$$;
