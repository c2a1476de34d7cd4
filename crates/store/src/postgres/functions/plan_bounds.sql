-- The numbers of the messages that were published in a time. The numbers are read from the messages of that
-- time. A transaction that was open for long before it published has a number far from those around it.
-- With `+ 0` the rows are found by their times; by the index of numbers they would be found one by one.
CREATE OR REPLACE FUNCTION hapax.plan_bounds(
    since timestamptz, until timestamptz, OUT first bigint, OUT last bigint)
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp AS $$
    SELECT coalesce(min(m.message + 0), 1), coalesce(max(m.message + 0), 0) FROM hapax.message m
    WHERE m.created_at >= since AND m.created_at < until;
$$;
