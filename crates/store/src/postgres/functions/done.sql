-- Keeps: "done" once per fence, with the mark. A fence is valid until the next claim, replay or rejection,
-- even after its lease. The fence is no longer valid once the mark has passed the job, because another job
-- of its resource was applied in its place. Returns 0 if the fence is lost, 1 if the job is done now, 2 if
-- it was done before under this fence, 3 if it is done now and other jobs of its resource are ready.
CREATE OR REPLACE FUNCTION hapax.done(
    of_job uuid, of_fence bigint, of_result text, at timestamptz,
    of_status integer DEFAULT NULL, of_answer text DEFAULT NULL)
RETURNS integer
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    h hapax.handler;
    j hapax.job;
    mark bigint;
    verdict smallint;
    overtaken CONSTANT text := 'a newer version of its resource was applied meanwhile';
BEGIN
    SELECT * INTO j FROM hapax.job x WHERE x.job = of_job FOR UPDATE;
    IF NOT FOUND OR j.fence IS DISTINCT FROM of_fence OR j.started_at IS NULL THEN
        RETURN 0;
    ELSIF j.state = hapax.job_state('done') THEN
        IF of_status IS NOT NULL AND j.answer_status IS NULL THEN
            -- The app completed the job itself before it answered.
            UPDATE hapax.job SET answer_status = of_status, answer = of_answer WHERE job = of_job;
        END IF;
        RETURN 2;
    ELSIF j.state IN (hapax.job_state('stale'), hapax.job_state('discarded')) THEN
        RETURN 0;
    END IF;
    SELECT * INTO h FROM hapax.handler x WHERE x.handler = j.handler;
    IF j.resource IS NOT NULL THEN
        LOOP
            SELECT m.position INTO mark FROM hapax.mark m
            WHERE m.lane = j.lane AND m.resource = j.resource
            FOR UPDATE;
            EXIT WHEN FOUND;
            -- The row never existed, or retention has just deleted it.
            INSERT INTO hapax.mark (lane, resource) VALUES (j.lane, j.resource)
            ON CONFLICT DO NOTHING;
        END LOOP;
        IF h.policy IS NOT NULL AND mark IS NOT NULL AND NOT j.forced THEN
            verdict := hapax.guard(h, mark, j.position);
            IF verdict = hapax.order_verdict('stale') OR (
                h.policy = hapax.order_policy('machine') AND verdict <> hapax.order_verdict('run'))
            THEN
                IF verdict = hapax.order_verdict('stale') AND j.state = hapax.job_state('leased') THEN
                    -- The job can only be stale from now on, so its resource need not wait for the
                    -- end of the lease. In a transaction of effects this is rolled back with them,
                    -- and the next claim records it.
                    PERFORM hapax.note_attempt(j, 'lost', at, overtaken);
                    UPDATE hapax.job
                    SET state = hapax.job_state('stale'), due_at = at, exclusive = false,
                        error = overtaken
                    WHERE job = of_job;
                    PERFORM hapax.ready_next(h, j.lane, j.resource, at);
                END IF;
                RETURN 0;
            END IF;
        END IF;
        UPDATE hapax.mark m
        SET position = CASE WHEN h.policy = hapax.order_policy('machine') THEN j.position
                            ELSE greatest(mark, j.position) END,
            moved_at = greatest(m.moved_at, date_bin('1 hour', at, timestamptz 'epoch'))
        WHERE m.lane = j.lane AND m.resource = j.resource;
    END IF;
    UPDATE hapax.job
    SET state = hapax.job_state('done'), due_at = at, result = left(of_result, 200), error = NULL,
        forced = false, exclusive = false, answer_status = of_status, answer = of_answer
    WHERE job = of_job;
    IF j.state <> hapax.job_state('leased') THEN
        -- The attempt was recorded as lost or failed, and was only slow. An attempt has only one recorded
        -- end.
        DELETE FROM hapax.attempt a
        WHERE a.job = of_job AND a.run = j.run AND a.attempt = j.attempt;
    END IF;
    IF j.resource IS NOT NULL AND hapax.ready_next(h, j.lane, j.resource, at) THEN
        RETURN 3;
    END IF;
    RETURN 1;
END $$;
