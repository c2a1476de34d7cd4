-- The number of keys below a caller's quota from which its requests are decided one by one. The number is
-- larger than concurrent transactions can add.
CREATE OR REPLACE FUNCTION hapax.key_margin() RETURNS bigint
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN 4000;
