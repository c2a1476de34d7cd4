-- Runs again the jobs of an event that may run again, or returns the effect that a replay would
-- have. One row for each of `lanes`: 0 it runs (a job that waits for its next attempt is due now),
-- 1 it is done and stays so, 2 a newer version was applied, 3 it is open as it is, 4 an operator
-- rejected it; null if nothing can be done. There are no rows for an event that waits for review,
-- was rejected there or is pruned: it has nothing to run again. ended_before: a job that ended or
-- died at that time or later stays as it is. adds_jobs: whether a handler without a job gets one.
CREATE OR REPLACE FUNCTION hapax.replay(
    of_event uuid, lanes integer[], resources text[], places bigint[], hopeless text[],
    force boolean, dry_run boolean, who text, reason text, acted_at timestamptz,
    now_at timestamptz DEFAULT NULL, ended_before timestamptz DEFAULT NULL,
    adds_jobs boolean DEFAULT true)
RETURNS TABLE (effect integer)
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    at CONSTANT timestamptz := coalesce(now_at, statement_timestamp());
    h hapax.handler;
    j hapax.job;
    n record;
    mark bigint;
    is_there boolean;
    changed boolean := false;
BEGIN
    -- Retention reads jobs and then deletes them: no job may become ready in between.
    PERFORM pg_advisory_xact_lock_shared(hapax.replay_lock());
    PERFORM FROM hapax.event e JOIN hapax.body b ON b.id = e.id
    WHERE e.id = of_event AND e.state = hapax.event_state('open')
    -- This lock is compatible with that of ingest: a copy of the event does not wait for the end of
    -- a plan's slice.
    FOR NO KEY UPDATE OF e;
    IF NOT FOUND THEN
        RETURN;
    END IF;
    FOR n IN
        SELECT * FROM unnest(lanes, resources, places, hopeless) r (lane, resource, place, hopeless)
    LOOP
        SELECT x.* INTO h FROM hapax.lane l JOIN hapax.handler x ON x.handler = l.handler
        WHERE l.lane = n.lane;
        SELECT x.* INTO j FROM hapax.job x WHERE x.job = hapax.job_id(of_event, n.lane) FOR UPDATE;
        is_there := FOUND;
        SELECT m.position INTO mark FROM hapax.mark m
        WHERE m.lane = n.lane AND m.resource = n.resource;
        effect := CASE
            WHEN NOT is_there AND NOT adds_jobs THEN NULL
            WHEN is_there AND j.due_at >= ended_before
                AND (hapax.is_over(j.state) OR j.state = hapax.job_state('dead')) THEN NULL
            WHEN is_there AND j.state = hapax.job_state('ready') AND j.due_at > at THEN 0
            WHEN is_there AND NOT hapax.is_over(j.state) AND j.state <> hapax.job_state('dead') THEN 3
            WHEN is_there AND j.state = hapax.job_state('done') AND NOT force THEN 1
            WHEN is_there AND j.state = hapax.job_state('stale') AND NOT force THEN 2
            WHEN is_there AND j.state = hapax.job_state('discarded') AND NOT force THEN 4
            WHEN n.hopeless IS NOT NULL THEN NULL
            WHEN force THEN 0
            WHEN n.place IS NOT NULL AND hapax.guard(h, mark, n.place) = hapax.order_verdict('stale') THEN 2
            ELSE 0 END;
        RETURN NEXT;
        CONTINUE WHEN dry_run;
        changed := changed OR effect = 0
            OR (effect = 2 AND (NOT is_there OR j.state = hapax.job_state('dead')));
        IF NOT is_there AND effect IN (0, 2) THEN
            PERFORM hapax.write_jobs(
                of_event, ARRAY[n.lane], ARRAY[n.resource], ARRAY[n.place], ARRAY[n.hopeless], at);
            UPDATE hapax.event SET has_jobs = true WHERE id = of_event AND NOT has_jobs;
            IF force THEN
                UPDATE hapax.job SET forced = true WHERE job = hapax.job_id(of_event, n.lane);
            END IF;
        ELSIF effect = 2 AND j.state = hapax.job_state('dead') THEN
            -- A newer version was applied while the job was dead: it no longer needs a decision.
            UPDATE hapax.job SET state = hapax.job_state('stale'), due_at = at WHERE job = j.job;
        ELSIF effect = 0 AND j.state = hapax.job_state('ready') THEN
            UPDATE hapax.job SET due_at = at WHERE job = j.job;
        ELSIF effect = 0 THEN
            IF j.state = hapax.job_state('done') THEN
                -- From now on the job's row describes the new run, so its last attempt is copied first.
                PERFORM hapax.note_attempt(j, 'done', j.due_at, NULL, j.answer_status, j.answer);
            END IF;
            -- A dead job continues its run with a fresh schedule, and alone if it was lost before.
            -- A finished job gets a new run, and with it a new idempotency key.
            UPDATE hapax.job
            SET state = hapax.job_state('ready'), due_at = at, fence = hapax.next_fence(fence),
                run = run + CASE WHEN j.state = hapax.job_state('dead') THEN 0 ELSE 1 END,
                attempt = CASE WHEN j.state = hapax.job_state('dead') THEN attempt ELSE 0 END,
                earlier_attempts = CASE WHEN j.state = hapax.job_state('dead')
                                        THEN greatest(attempt - least(lost, 1), 0) ELSE 0 END,
                steps = 0,
                lost = CASE WHEN j.state = hapax.job_state('dead') THEN least(lost, 1) ELSE 0 END,
                forced = force, resource = n.resource, position = n.place, result = NULL,
                error = NULL, started_at = NULL, worker = NULL, answer_status = NULL, answer = NULL
            WHERE job = j.job;
        END IF;
    END LOOP;
    -- A replay that changed nothing is not recorded.
    IF changed THEN
        INSERT INTO hapax.action (event, what, who, reason, at)
        VALUES (of_event, 'replay', replay.who, replay.reason, acted_at);
    END IF;
END $$;
