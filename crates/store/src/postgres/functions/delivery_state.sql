-- The number in hapax.delivery.state, by its name; an unknown name is an error. As hapax.job_state.
-- hapax_core::delivery says what each state means.
CREATE OR REPLACE FUNCTION hapax.delivery_state(name text) RETURNS integer
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN CASE name
    WHEN 'ready' THEN 0
    WHEN 'leased' THEN 1
    WHEN 'delivered' THEN 2
    WHEN 'dead' THEN 3
    WHEN 'cancelled' THEN 4
    WHEN 'parked' THEN 5
    ELSE (name || ' is no state of a delivery')::pg_catalog.int4
END;
