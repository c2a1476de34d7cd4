-- Keeps: every delivery of a deleted endpoint ends, even if it was committed after the deletion. Cancels
-- at most `most` and returns how many. A locked delivery is being settled: a later call cancels it. The
-- fence stays valid: if the request got through, the delivery is delivered. An endpoint is checked until
-- none of its deliveries is open and every transaction that may have seen the endpoint has ended.
-- hapax.due_endpoints marks the endpoint again if a delivery is committed later.
CREATE OR REPLACE FUNCTION hapax.cancel_orphans(most integer, now_at timestamptz DEFAULT NULL)
RETURNS integer
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    at CONSTANT timestamptz := coalesce(now_at, statement_timestamp());
    gone integer;
    since xid8;
    d record;
    cancelled integer := 0;
BEGIN
    FOR gone, since IN
        SELECT e.endpoint, e.deleted_in FROM hapax.endpoint e WHERE e.orphans ORDER BY e.endpoint
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
                WHERE x.endpoint + 0 = gone AND x.state = hapax.delivery_state('leased')
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
        UPDATE hapax.endpoint e SET orphans = false
        WHERE e.endpoint = gone AND since < pg_snapshot_xmin(pg_current_snapshot())
          AND NOT EXISTS (SELECT FROM hapax.delivery x
                          WHERE x.endpoint = gone AND x.state = hapax.delivery_state('ready'))
          AND NOT EXISTS (SELECT FROM hapax.delivery x
                          WHERE x.endpoint + 0 = gone AND x.state = hapax.delivery_state('leased'))
          AND NOT EXISTS (SELECT FROM hapax.delivery x
                          WHERE x.endpoint = gone AND x.state = hapax.delivery_state('parked'));
    END LOOP;
    RETURN cancelled;
END $$;
