-- The number in hapax.job.state, by its name; an unknown name is an error. PostgreSQL replaces a call by
-- the number when it makes a plan, so that partial indexes, whose predicates hold the numbers, are used.
-- hapax_core::lifecycle says what each state means.
CREATE OR REPLACE FUNCTION hapax.job_state(name text) RETURNS integer
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN CASE name
    WHEN 'ready' THEN 0
    WHEN 'leased' THEN 1
    WHEN 'done' THEN 2
    WHEN 'stale' THEN 3
    WHEN 'dead' THEN 4
    WHEN 'held' THEN 5
    WHEN 'parked' THEN 6
    WHEN 'review' THEN 7
    WHEN 'discarded' THEN 8
    ELSE (name || ' is no state of a job')::pg_catalog.int4
END;
