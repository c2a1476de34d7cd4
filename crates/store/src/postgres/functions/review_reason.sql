-- The number in hapax.event.review, by its name: why an event waits for an operator, or waited. See
-- hapax.job_state.
CREATE OR REPLACE FUNCTION hapax.review_reason(name text) RETURNS integer
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN CASE name
    WHEN 'none' THEN 0
    WHEN 'late' THEN 1
    WHEN 'replay' THEN 2
    WHEN 'conflict' THEN 3
    ELSE (name || ' is no reason for review')::pg_catalog.int4
END;
