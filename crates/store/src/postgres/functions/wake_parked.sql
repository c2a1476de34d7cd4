-- Keeps: no job stays parked at a free resource, even if the transaction that should have readied it
-- skipped it. Checks up to 16 resources after the given one, and returns the last of them. Returns
-- null if all are checked.
CREATE OR REPLACE FUNCTION hapax.wake_parked(
    h hapax.handler, at timestamptz, INOUT of_lane integer, INOUT of_resource text)
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    FOR look IN 1..16 LOOP
        SELECT x.lane, x.resource INTO of_lane, of_resource FROM hapax.job x
        WHERE x.handler = h.handler AND x.state = hapax.job_state('parked')
          AND (x.lane, x.resource) > (coalesce(of_lane, 0), coalesce(of_resource, ''))
        ORDER BY x.lane, x.resource, x.position, x.job LIMIT 1;
        EXIT WHEN NOT FOUND;
        PERFORM hapax.ready_next(h, of_lane, of_resource, at);
    END LOOP;
END $$;
