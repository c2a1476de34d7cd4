-- The first fence of a key that has no row: a random number that belongs to the three days after
-- the given time.
CREATE OR REPLACE FUNCTION hapax.first_fence(at timestamptz) RETURNS bigint
LANGUAGE sql VOLATILE AS $$
    SELECT hapax.next_fence(hapax.fence_floor(at));
$$;
