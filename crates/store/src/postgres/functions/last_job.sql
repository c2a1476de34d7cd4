-- The last id that a job of this event can have. The ids of its jobs are in the range from the
-- event's own id to this one. The function sets no search_path, so that PostgreSQL can inline it.
CREATE OR REPLACE FUNCTION hapax.last_job(event uuid) RETURNS uuid
LANGUAGE sql IMMUTABLE STRICT PARALLEL SAFE
RETURN pg_catalog.encode(
    overlay(pg_catalog.uuid_send(event) PLACING pg_catalog.decode('ffffff', 'hex') FROM 14), 'hex'
)::pg_catalog.uuid;
