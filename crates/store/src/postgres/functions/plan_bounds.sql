-- The lowest and highest number of the messages that were published in a span of time, read from these
-- messages. A message whose transaction was open for long has a number far from those of its neighbours in
-- time. `+ 0` makes the planner find the rows by their times. With the index of numbers, PostgreSQL would
-- check the rows one by one.
CREATE OR REPLACE FUNCTION hapax.plan_bounds(
    since timestamptz, until timestamptz, OUT first bigint, OUT last bigint)
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp AS $$
    SELECT coalesce(min(m.message + 0), 1), coalesce(max(m.message + 0), 0) FROM hapax.message m
    WHERE m.created_at >= since AND m.created_at < until;
$$;
