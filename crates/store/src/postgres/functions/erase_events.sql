-- Deletes body, history and jobs of up to `most` events of a tenant that is deleted, whether they are finished or
-- not. Returns the deletion with its new position. An unfinished event counts as discarded. The narrow row stays,
-- with the key and the guard. An event that was pruned before loses the rows of its copies. An event with a job that
-- another transaction has locked is left for another pass.
--
-- The deletion covers an event whose transaction began before that of the deletion. received_at
-- does not show this, because it is the clock of a node. xmin of the body does, because a body is
-- never updated. After a restore, or after two billion transactions, xmin means nothing. So an
-- event that was received more than an hour before the deletion is always covered, and one that was
-- received more than an hour after it is never covered.
CREATE OR REPLACE FUNCTION hapax.erase_events(
    INOUT d hapax.tenant_deletion, most integer, OUT hashes uuid[])
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    nothing CONSTANT uuid := '00000000-0000-0000-0000-000000000000';
    everything CONSTANT uuid := 'ffffffff-ffff-ffff-ffff-ffffffffffff';
    of_source text;
    last_read uuid;
    seen integer;
    events uuid[];
    pruned uuid[];
    busy uuid[];
    unfinished uuid[];
BEGIN
    hashes := '{}';
    IF d.passed_source = '' OR d.passed_event = everything THEN
        SELECT min(p.source) INTO of_source FROM hapax.pair p
        WHERE p.tenant = d.tenant AND p.source > d.passed_source;
        IF of_source IS NULL THEN
            d.phase := 1 /* messages */;
            RETURN;
        END IF;
        d.passed_source := of_source;
        d.passed_event := nothing;
    END IF;
    of_source := d.passed_source;
    PERFORM pg_advisory_xact_lock(x'6861706178000003'::bigint);
    IF NOT hapax.exclude_replays() THEN
        RETURN;
    END IF;
    SELECT coalesce(array_agg(r.id ORDER BY r.id) FILTER (WHERE r.is_covered), '{}'),
        array_agg(r.id) FILTER (WHERE r.is_pruned),
        (array_agg(r.id ORDER BY r.id DESC))[1], count(*)
    INTO events, pruned, last_read, seen
    FROM (
        -- The condition is one range of event_source.
        SELECT e.id,
            e.tenant = d.tenant AND e.received_at <= d.began_at + interval '1 hour'
            AND (SELECT e.received_at < d.began_at - interval '1 hour'
                        OR age(b.xmin) >= age(d.began_in::xid) FROM hapax.body b
                 WHERE b.id = e.id) IS TRUE AS is_covered,
            e.tenant = d.tenant
            AND (SELECT true FROM hapax.body b WHERE b.id = e.id) IS NULL AS is_pruned
        FROM hapax.event e
        WHERE (e.source, e.id) > (of_source, d.passed_event)
          AND (e.source, e.id) < (of_source, everything)
        ORDER BY e.source, e.id LIMIT 5000) r;
    IF cardinality(events) > most THEN
        events := events[1:most];
        d.passed_event := events[most];
    ELSIF seen = 5000 THEN
        d.passed_event := last_read;
    ELSE
        d.passed_event := everything;
    END IF;
    -- Later arrivals of these events are only counted, but a copy that was written beside retention has a row.
    pruned := ARRAY(SELECT p.id FROM unnest(pruned) p (id) WHERE p.id <= d.passed_event);
    DELETE FROM hapax.arrival a WHERE a.event = ANY (pruned);
    DELETE FROM hapax.copy c WHERE c.event = ANY (pruned);
    IF events = '{}' THEN
        RETURN;
    END IF;
    -- A user's transaction may be completing a job right now.
    SELECT array_agg(DISTINCT j.event) INTO busy FROM hapax.job j
    JOIN unnest(events) s (id) ON j.job >= s.id AND j.job <= hapax.last_job(s.id)
    WHERE j.job NOT IN (
        SELECT l.job FROM (
            SELECT k.job FROM hapax.job k
            JOIN unnest(events) t (id) ON k.job >= t.id AND k.job <= hapax.last_job(t.id)
            FOR UPDATE OF k SKIP LOCKED) l);
    IF busy IS NOT NULL THEN
        d.is_last_pass := false;
        events := ARRAY(SELECT s.id FROM unnest(events) s (id) WHERE s.id <> ALL (busy));
    END IF;
    SELECT array_agg(u.id) INTO unfinished FROM (
        SELECT e.id FROM hapax.event e
        WHERE e.id = ANY (events) AND e.state = hapax.event_state('review')
        UNION
        SELECT j.event FROM hapax.job j
        JOIN unnest(events) s (id) ON j.job >= s.id AND j.job <= hapax.last_job(s.id)
        WHERE NOT hapax.is_over(j.state)) u;
    PERFORM hapax.note_ended(events, unfinished);
    INSERT INTO hapax.ended (event, status) SELECT u.id, 'discarded' FROM unnest(unfinished) u (id)
    ON CONFLICT (event) DO UPDATE SET status = excluded.status;
    UPDATE hapax.event e SET state = hapax.event_state('discarded')
    WHERE e.id = ANY (events) AND e.state = hapax.event_state('review');
    PERFORM hapax.strip_each(events);
    hashes := ARRAY(SELECT e.hash FROM hapax.event e WHERE e.id = ANY (events));
    d.events := d.events + cardinality(events);
END $$;
