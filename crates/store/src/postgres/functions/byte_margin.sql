-- As hapax.key_margin, for a quota of bytes.
CREATE OR REPLACE FUNCTION hapax.byte_margin(max_bytes bigint) RETURNS bigint
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN least(64 * 1048576, max_bytes / 2);
