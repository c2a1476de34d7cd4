-- The lanes of a handler with a due job, at most `most`: first those after after_lane, then from the start
-- up to it. The function probes each lane once, however many jobs wait in it. known_lanes and known_since:
-- see hapax.claim. last_lane: the last lane that was probed.
CREATE OR REPLACE FUNCTION hapax.due_lanes(
    of_handler integer, most integer, after_lane integer, known_lanes integer[],
    known_since timestamptz[], at timestamptz, OUT lanes integer[], OUT last_lane integer)
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    wrapped boolean := false;
    next_known integer;
    next_lane integer;
    first_due timestamptz;
BEGIN
    lanes := '{}';
    last_lane := coalesce(after_lane, 0);
    FOR look IN 1..256 LOOP
        EXIT WHEN cardinality(lanes) >= most;
        SELECT min(k) INTO next_known FROM unnest(known_lanes) k WHERE k > last_lane;
        SELECT x.lane, x.due_at INTO next_lane, first_due FROM hapax.job x
        WHERE x.handler = of_handler AND x.state = hapax.job_state('ready') AND x.lane > last_lane
          AND x.lane < coalesce(next_known, 2147483647)
        ORDER BY x.lane, x.due_at, x.job LIMIT 1;
        IF NOT FOUND AND next_known IS NOT NULL THEN
            next_lane := next_known;
            SELECT x.due_at INTO first_due FROM hapax.job x
            WHERE x.handler = of_handler AND x.state = hapax.job_state('ready')
              AND x.lane = next_known
              AND x.due_at >= known_since[array_position(known_lanes, next_known)]
            ORDER BY x.due_at, x.job LIMIT 1;
        ELSIF NOT FOUND THEN
            EXIT WHEN wrapped OR after_lane IS NULL;
            wrapped := true;
            last_lane := 0;
            CONTINUE;
        END IF;
        EXIT WHEN wrapped AND next_lane > after_lane;
        last_lane := next_lane;
        IF first_due <= at THEN
            lanes := lanes || last_lane;
        END IF;
    END LOOP;
END $$;
