-- Keeps: the narrow row of every event. Deletes body, jobs and history of finished events past their
-- time. Events that are open, dead or in review stay. An event is whole exactly while its body exists, so
-- the narrow row is not written: that would write a random page of the index on its hash. Replays, which
-- add jobs to finished events, are excluded meanwhile.
-- One slice is within one partition of bodies. Returns the last id read (null: all were read, or another
-- node is pruning: `alone`), the number of stripped events, and the sources of the others with the
-- arrival time of the oldest one.
CREATE OR REPLACE FUNCTION hapax.strip(
    after uuid, bound uuid, before timestamptz, most integer,
    OUT reached uuid, OUT taken integer, OUT alone boolean, OUT left_of text[],
    OUT left_since timestamptz[]
)
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
-- A plan that was made while the tables were small must work for large ones too. The functions that
-- this one calls make their plans under the same settings.
SET enable_seqscan = off
SET enable_bitmapscan = off
AS $$
DECLARE
    day_after uuid;
    seen uuid[];
    unfinished uuid[];
    unusual uuid[];
    run record;
    few uuid[] := '{}';
BEGIN
    taken := 0;
    PERFORM hapax.commit_without_sync();
    alone := pg_try_advisory_xact_lock(x'6861706178000003'::bigint) AND hapax.exclude_replays();
    IF NOT alone THEN
        RETURN;
    END IF;
    SELECT hapax.day_after(b.id) INTO day_after FROM hapax.body b
    WHERE b.id > after AND b.id < bound ORDER BY b.id LIMIT 1;
    IF NOT FOUND THEN
        RETURN;
    END IF;
    -- The bodies of a partition whose removal was interrupted are not seen: no range may span it.
    seen := ARRAY(
        SELECT b.id FROM hapax.body b
        WHERE b.id > after AND b.id < least(bound, day_after) ORDER BY b.id LIMIT most);
    IF cardinality(seen) = most THEN
        reached := seen[most];
    ELSIF day_after < bound THEN
        reached := day_after;
    END IF;
    SELECT array_agg(e.id) FILTER (
               WHERE e.received_at >= before OR e.state = hapax.event_state('review')),
           array_agg(e.id) FILTER (WHERE e.state = hapax.event_state('discarded'))
    INTO unfinished, unusual
    FROM unnest(seen) s (id)
    CROSS JOIN LATERAL (SELECT x.* FROM hapax.event x WHERE x.id = s.id LIMIT 1) e;
    SELECT unfinished || array_agg(j.event) FILTER (WHERE NOT hapax.is_over(j.state)),
           unusual || array_agg(j.event) FILTER (
               WHERE j.state IN (hapax.job_state('stale'), hapax.job_state('discarded')))
    INTO unfinished, unusual
    FROM hapax.job j
    WHERE j.job >= seen[1] AND j.job <= hapax.last_job(seen[cardinality(seen)]);
    IF unusual IS NOT NULL THEN
        PERFORM hapax.note_ended(unusual, unfinished);
    END IF;
    -- Finished events that are adjacent form one run.
    FOR run IN
        SELECT array_agg(n.id ORDER BY n.id) AS events FROM (
            SELECT m.id, m.is_left, count(*) FILTER (WHERE m.is_left) OVER (ORDER BY m.id) AS number
            FROM (
                SELECT u.id, bool_or(u.is_left) AS is_left FROM (
                    SELECT s.id, false AS is_left FROM unnest(seen) s (id)
                    UNION ALL SELECT l.id, true FROM unnest(unfinished) l (id)) u
                GROUP BY u.id) m) n
        WHERE NOT n.is_left GROUP BY n.number
    LOOP
        taken := taken + cardinality(run.events);
        IF cardinality(run.events) < 16 OR NOT hapax.strip_run(run.events) THEN
            few := few || run.events;
        END IF;
    END LOOP;
    IF few <> '{}' THEN
        PERFORM hapax.strip_each(few);
    END IF;
    IF taken < cardinality(seen) THEN
        SELECT array_agg(l.source), array_agg(l.since) INTO left_of, left_since FROM (
            SELECT e.source, min(e.received_at) AS since
            FROM unnest(unfinished) s (id)
            CROSS JOIN LATERAL (SELECT x.* FROM hapax.event x WHERE x.id = s.id LIMIT 1) e
            GROUP BY e.source) l;
    END IF;
END $$;
