-- How close to its quota of keys the requests of a caller are decided one by one: this is more than
-- concurrent transactions can add.
CREATE OR REPLACE FUNCTION hapax.key_margin() RETURNS bigint
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN 4000;
