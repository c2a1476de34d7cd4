-- The number in hapax.handler.workplace, by its name: where the work runs. Only work in the node's own
-- process can end it. See hapax.job_state.
CREATE OR REPLACE FUNCTION hapax.workplace(name text) RETURNS integer
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN CASE name
    WHEN 'node' THEN 0
    WHEN 'app' THEN 1
    WHEN 'workers' THEN 2
    ELSE (name || ' is no workplace')::pg_catalog.int4
END;
