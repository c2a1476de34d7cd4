-- Writes those jobs of an event that do not exist yet. Called on arrival, and when an operator
-- decides.
CREATE OR REPLACE FUNCTION hapax.write_jobs(
    of_event uuid, lanes integer[], resources text[], places bigint[], hopeless text[],
    at timestamptz)
RETURNS void
LANGUAGE sql SET search_path = pg_catalog, pg_temp AS $$
    INSERT INTO hapax.job (job, event, handler, lane, state, due_at, resource, position, error)
    SELECT hapax.job_id(of_event, n.lane), of_event, l.handler, n.lane,
        s.state, hapax.first_due(at, h.retry, s.state),
        n.resource, n.place, n.hopeless
    FROM unnest(lanes, resources, places, hopeless) n (lane, resource, place, hopeless)
    CROSS JOIN LATERAL (
        SELECT CASE WHEN n.hopeless IS NULL THEN hapax.job_state('ready')
                    ELSE hapax.job_state('dead') END::smallint) s (state)
    -- The lanes are read row by row: a join may start with the handlers, and would then read all
    -- lanes of one.
    CROSS JOIN LATERAL (SELECT x.handler FROM hapax.lane x WHERE x.lane = n.lane LIMIT 1) l
    CROSS JOIN LATERAL (SELECT x.retry FROM hapax.handler x WHERE x.handler = l.handler LIMIT 1) h
    ON CONFLICT (job) DO NOTHING;
$$;
