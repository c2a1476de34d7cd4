-- Keeps: a delivery of a deleted endpoint ends, also one that a transaction committed after the deletion.
-- Cancels at most `most` and returns how many. A locked delivery is being settled: a later call cancels it.
-- The fence stays good: if the request got through, it is delivered.
CREATE OR REPLACE FUNCTION hapax.cancel_orphans(most integer, now_at timestamptz DEFAULT NULL)
RETURNS integer
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    at CONSTANT timestamptz := coalesce(now_at, statement_timestamp());
    gone integer;
    d record;
    cancelled integer := 0;
BEGIN
    FOR gone IN
        SELECT e.endpoint FROM hapax.endpoint e WHERE e.deleted_at IS NOT NULL ORDER BY e.endpoint
    LOOP
        EXIT WHEN cancelled >= most;
        FOR d IN
            SELECT r.message FROM (
                SELECT x.message FROM hapax.delivery x
                WHERE x.endpoint = gone AND x.state = hapax.delivery_state('ready')
                ORDER BY x.due_at LIMIT most - cancelled FOR UPDATE SKIP LOCKED) r
            UNION ALL
            SELECT l.message FROM (
                SELECT x.message FROM hapax.delivery x
                WHERE x.endpoint = gone AND x.state = hapax.delivery_state('leased')
                ORDER BY x.message LIMIT most - cancelled FOR UPDATE SKIP LOCKED) l
            UNION ALL
            SELECT p.message FROM (
                SELECT x.message FROM hapax.delivery x
                WHERE x.endpoint = gone AND x.state = hapax.delivery_state('parked')
                ORDER BY x.message LIMIT most - cancelled FOR UPDATE SKIP LOCKED) p
        LOOP
            UPDATE hapax.delivery x
            SET state = hapax.delivery_state('cancelled'), due_at = at,
                error = 'its endpoint was deleted'
            WHERE x.message = d.message AND x.endpoint = gone;
            cancelled := cancelled + 1;
            EXIT WHEN cancelled >= most;
        END LOOP;
    END LOOP;
    RETURN cancelled;
END $$;
