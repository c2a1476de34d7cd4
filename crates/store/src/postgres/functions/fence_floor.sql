-- The number below every first fence of a key that is reserved at this time or later.
CREATE OR REPLACE FUNCTION hapax.fence_floor(at timestamptz) RETURNS bigint
LANGUAGE sql STABLE PARALLEL SAFE
RETURN greatest(pg_catalog.date_part('epoch', at)::bigint - 1704067200, 0) << 22;
