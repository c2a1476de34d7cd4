-- Why the deliveries of an endpoint are held while its circuit is not closed, as
-- hapax_core::circuit::open_reason.
CREATE OR REPLACE FUNCTION hapax.open_reason(failures integer, error text) RETURNS text
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN 'the endpoint failed ' || failures || ' times in a row and is tried again later; the last error: '
    || error;
