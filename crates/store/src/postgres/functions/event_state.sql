-- The number in hapax.event.state, by its name; see hapax.job_state. An open event has jobs, or none
-- if no handler is for it.
CREATE OR REPLACE FUNCTION hapax.event_state(name text) RETURNS integer
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN CASE name
    WHEN 'open' THEN 0
    WHEN 'review' THEN 1
    WHEN 'discarded' THEN 2
    ELSE (name || ' is no state of an event')::pg_catalog.int4
END;
