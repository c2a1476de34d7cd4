-- Keeps: the jobs of an event in review are written once, however many operators approve it or
-- on-time copies arrive. If jobs of the event are in review instead, they become ready, whatever
-- the guard decides, or discarded with `refused`. Returns true if the event or a job waited for
-- this decision. Then the decision is recorded. since_before: a job that went to review at that
-- time or later stays there.
CREATE OR REPLACE FUNCTION hapax.decide(
    of_event uuid, refused boolean, lanes integer[], resources text[], places bigint[],
    hopeless text[], who text, reason text, acted_at timestamptz, now_at timestamptz DEFAULT NULL,
    since_before timestamptz DEFAULT NULL)
RETURNS boolean
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    at CONSTANT timestamptz := coalesce(now_at, statement_timestamp());
BEGIN
    UPDATE hapax.event
    SET state = CASE WHEN refused THEN hapax.event_state('discarded') ELSE hapax.event_state('open') END,
        has_jobs = has_jobs OR NOT refused AND cardinality(lanes) > 0
    WHERE id = of_event AND state = hapax.event_state('review');
    IF FOUND THEN
        IF NOT refused THEN
            PERFORM hapax.write_jobs(of_event, lanes, resources, places, hopeless, at);
        END IF;
    ELSE
        UPDATE hapax.job
        SET state = CASE WHEN refused THEN hapax.job_state('discarded') ELSE hapax.job_state('ready') END,
            due_at = at,
            forced = NOT refused, error = CASE WHEN refused THEN error END,
            fence = CASE WHEN refused THEN hapax.next_fence(fence) ELSE fence END
        WHERE job BETWEEN of_event AND hapax.last_job(of_event)
          AND state = hapax.job_state('review')
          AND (since_before IS NULL OR due_at < since_before);
        IF NOT FOUND THEN
            RETURN false;
        END IF;
    END IF;
    INSERT INTO hapax.action (event, what, who, reason, at)
    VALUES (of_event, CASE WHEN refused THEN 'reject' ELSE 'approve' END, decide.who, decide.reason,
            acted_at);
    RETURN true;
END $$;
