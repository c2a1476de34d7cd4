-- The first id after the day of this id: the end of that day's partition of bodies. An id begins with its
-- time, 48 bits of milliseconds.
CREATE OR REPLACE FUNCTION hapax.day_after(id uuid) RETURNS uuid
LANGUAGE sql IMMUTABLE SET search_path = pg_catalog, pg_temp AS $$
    SELECT rpad(lpad(to_hex(
        (('x' || left(replace(id::text, '-', ''), 12))::bit(48)::bigint / 86400000 + 1) * 86400000),
        12, '0'), 32, '0')::uuid;
$$;
