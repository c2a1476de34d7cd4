-- The number that hapax.guard returns and hapax.transition.says holds, by its name; see hapax.job_state.
CREATE OR REPLACE FUNCTION hapax.order_verdict(name text) RETURNS integer
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN CASE name
    WHEN 'run' THEN 0
    WHEN 'stale' THEN 1
    WHEN 'hold' THEN 2
    ELSE (name || ' is no verdict on an order')::pg_catalog.int4
END;
