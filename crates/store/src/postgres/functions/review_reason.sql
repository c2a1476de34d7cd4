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

-- The views call this function, so a role that reads a view must be able to execute it. The function
-- reads no table.
GRANT EXECUTE ON FUNCTION hapax.review_reason(text) TO PUBLIC;
