-- Keeps: one node at a time judges the data of all nodes. Records that a node is alive, with its handlers as JSON, and
-- takes or renews the lease of the judge. handlers: those of all nodes that checked in within alive_us.
CREATE OR REPLACE FUNCTION hapax.check_in(
    of_node uuid, of_name text, lease_us bigint, of_handlers text, alive_us bigint, now_at timestamptz DEFAULT NULL,
    OUT is_judge boolean, OUT handlers text[])
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
#variable_conflict use_column
DECLARE
    at CONSTANT timestamptz := coalesce(now_at, clock_timestamp());
BEGIN
    INSERT INTO hapax.node AS n (node, name, started_at, seen_at, stopped, handlers)
    VALUES (of_node, of_name, at, at, false, of_handlers)
    ON CONFLICT (node) DO UPDATE SET name = excluded.name, seen_at = excluded.seen_at,
        stopped = excluded.stopped, handlers = excluded.handlers;
    DELETE FROM hapax.node n WHERE n.node IN (
        SELECT o.node FROM hapax.node o WHERE o.seen_at < at - interval '1 day' FOR UPDATE SKIP LOCKED);
    UPDATE hapax.alert_board b SET judge = of_node, judge_until = at + lease_us * interval '1 microsecond'
    WHERE b.judge = of_node OR b.judge_until <= at;
    is_judge := FOUND;
    SELECT array_agg(DISTINCT n.handlers) INTO handlers
    FROM hapax.node n WHERE n.seen_at >= at - alive_us * interval '1 microsecond';
END $$;
