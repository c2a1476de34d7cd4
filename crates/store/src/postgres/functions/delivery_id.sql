-- A delivery's id: a UUID of version 7 with the message's time and 12 bits of its fingerprint, then 24 bits
-- of the endpoint's number and 38 of the message's.
CREATE OR REPLACE FUNCTION hapax.delivery_id(
    created_at timestamptz, fingerprint uuid, message bigint, endpoint integer)
RETURNS uuid
-- The function is not STRICT, and not IMMUTABLE because EXTRACT is not, so that the planner can inline it.
LANGUAGE sql STABLE PARALLEL SAFE
RETURN (
    pg_catalog.lpad(pg_catalog.to_hex(
        pg_catalog.floor(EXTRACT(epoch FROM created_at) * 1000)::pg_catalog.int8), 12, '0')
    || '7' || pg_catalog.left(fingerprint::pg_catalog.text, 3)
    || pg_catalog.to_hex(
        (-9223372036854775808)::pg_catalog.int8 | (endpoint::pg_catalog.int8 << 38) | message)
)::pg_catalog.uuid;
