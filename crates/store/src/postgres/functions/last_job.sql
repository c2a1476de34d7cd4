-- The last id that a job of this event can have: its jobs are the range from the event's own id to
-- this. Without a search_path, so that PostgreSQL can inline it.
CREATE OR REPLACE FUNCTION hapax.last_job(event uuid) RETURNS uuid
LANGUAGE sql IMMUTABLE STRICT PARALLEL SAFE
RETURN pg_catalog.encode(
    overlay(pg_catalog.uuid_send(event) PLACING pg_catalog.decode('ffffff', 'hex') FROM 14), 'hex'
)::pg_catalog.uuid;

-- The views call it, and a role that may read a view calls the functions in it. It reads no table.
GRANT EXECUTE ON FUNCTION hapax.last_job(uuid) TO PUBLIC;
