-- The number in hapax.handler.policy, by its name; see hapax.job_state. A handler without an order has
-- none.
CREATE OR REPLACE FUNCTION hapax.order_policy(name text) RETURNS integer
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN CASE name
    WHEN 'latest' THEN 0
    WHEN 'sequence' THEN 1
    WHEN 'machine' THEN 2
    ELSE (name || ' is no order policy')::pg_catalog.int4
END;
