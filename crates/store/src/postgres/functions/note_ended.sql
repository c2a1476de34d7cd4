-- Records how each of these events ended, unless the event is unfinished or its narrow row implies how it
-- ended. Without a record, an event with jobs was processed, and an event without jobs was ignored.
CREATE OR REPLACE FUNCTION hapax.note_ended(events uuid[], unfinished uuid[]) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    INSERT INTO hapax.ended (event, status)
    SELECT e.id, s.status FROM (SELECT DISTINCT u.id FROM unnest(events) u (id)) o
    CROSS JOIN LATERAL (SELECT x.* FROM hapax.event x WHERE x.id = o.id LIMIT 1) e
    CROSS JOIN LATERAL (
        SELECT CASE WHEN e.state = hapax.event_state('discarded') THEN 'discarded'
                    ELSE hapax.status(min(hapax.rank(j.state, j.steps))) END AS status
        FROM hapax.job j WHERE j.job >= e.id AND j.job <= hapax.last_job(e.id)) s
    WHERE (unfinished IS NULL OR e.id <> ALL (unfinished))
      AND s.status <> CASE WHEN e.has_jobs THEN 'processed' ELSE 'ignored' END
    ON CONFLICT (event) DO UPDATE SET status = excluded.status;
END $$;
