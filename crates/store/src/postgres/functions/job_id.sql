-- A job's id: the id of its event, with the lane in the last 24 bits.
CREATE OR REPLACE FUNCTION hapax.job_id(event uuid, lane integer) RETURNS uuid
LANGUAGE sql IMMUTABLE STRICT PARALLEL SAFE
RETURN pg_catalog.encode(
    overlay(pg_catalog.uuid_send(event)
            PLACING pg_catalog.substring(pg_catalog.int4send(lane), 2, 3) FROM 14), 'hex'
)::pg_catalog.uuid;
