-- The first fence of a key that has no row: a random number within three days of the time.
CREATE OR REPLACE FUNCTION hapax.first_fence(at timestamptz) RETURNS bigint
LANGUAGE sql VOLATILE AS $$
    SELECT hapax.next_fence(hapax.fence_floor(at));
$$;
