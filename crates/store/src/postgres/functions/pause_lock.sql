-- The first number of the advisory locks between the claims of a handler, which share one, and a pause of that
-- handler. The second number is the handler's.
CREATE OR REPLACE FUNCTION hapax.pause_lock() RETURNS integer
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN 1751216226;
