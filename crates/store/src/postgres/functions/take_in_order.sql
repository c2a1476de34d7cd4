-- Reads at most `room` due jobs of a lane, oldest first, and leases those whose turn it is. Order is
-- decided here, job by job (hapax.admit). A job in the node's own process that was lost before is taken alone: as the
-- first job of the claim, or not now. seen_until: no job that was due before this time is left in this lane. aside:
-- the events of jobs that turned out stale or are held.
CREATE OR REPLACE FUNCTION hapax.take_in_order(
    h hapax.handler, of_lane integer, room integer, since timestamptz, is_first boolean, who text,
    at timestamptz,
    OUT taken uuid[], OUT by_itself boolean, OUT seen_until timestamptz, OUT aside uuid[])
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    j hapax.job;
    is_alone boolean;
    admitted integer;
    skipped timestamptz;
    read integer;
    looked integer := 0;
BEGIN
    taken := '{}';
    aside := '{}';
    by_itself := false;
    LOOP
        read := 0;
        FOR j IN
            SELECT * FROM hapax.job x
            WHERE x.handler = h.handler AND x.lane = of_lane AND x.state = hapax.job_state('ready')
              AND x.due_at <= at AND x.due_at >= coalesce(seen_until, since)
            ORDER BY x.due_at, x.job LIMIT room - cardinality(taken)
            FOR UPDATE SKIP LOCKED
        LOOP
            read := read + 1;
            is_alone := j.lost > 0 AND h.workplace = hapax.workplace('node');
            IF is_alone AND NOT (is_first AND taken = '{}') THEN
                skipped := coalesce(skipped, j.due_at);
                CONTINUE;
            END IF;
            seen_until := j.due_at;
            IF j.resource IS NOT NULL THEN
                admitted := hapax.admit(h, j, at);
                IF admitted = 2 THEN
                    aside := aside || j.event;
                END IF;
                CONTINUE WHEN admitted <> 0;
            END IF;
            PERFORM hapax.lease_jobs(h, ARRAY[j.job], who, at, true);
            taken := taken || j.job;
            IF is_alone THEN
                by_itself := true;
                seen_until := NULL;
                RETURN;
            END IF;
        END LOOP;
        -- A job that was set aside is no longer due: the jobs behind it may run. The number bounds the work in
        -- this lane, and the time bounds it over all lanes of the claim.
        looked := looked + read;
        EXIT WHEN read = 0 OR cardinality(taken) >= room OR skipped IS NOT NULL
            OR looked - cardinality(taken) >= 256
            OR clock_timestamp() > statement_timestamp() + interval '100 milliseconds';
    END LOOP;
    seen_until := coalesce(skipped, seen_until);
END $$;
