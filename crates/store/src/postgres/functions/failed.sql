-- Keeps: a verdict uses one step of the schedule, once. `how`: 0 by the schedule, 1 by the schedule
-- but not before `wait`, 2 after exactly `wait`, 3 never again, 4 nothing was sent: the first 20
-- such attempts use no step, and the wait doubles with each; further ones follow the schedule.
-- `wait` is in microseconds. Returns 0 if the fence is lost or the job is no longer leased, 1 if
-- the failure is recorded, 3 if it is recorded and other jobs of the resource are ready.
CREATE OR REPLACE FUNCTION hapax.failed(
    of_job uuid, of_fence bigint, why text, how integer, wait bigint, dice double precision,
    now_at timestamptz DEFAULT NULL, of_status integer DEFAULT NULL, of_answer text DEFAULT NULL)
RETURNS integer
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    at CONSTANT timestamptz := coalesce(now_at, statement_timestamp());
    h hapax.handler;
    j hapax.job;
    scheduled bigint;
    micros double precision;
    unsent integer;
BEGIN
    SELECT * INTO j FROM hapax.job x WHERE x.job = of_job FOR UPDATE;
    IF NOT FOUND OR j.fence IS DISTINCT FROM of_fence OR j.state <> hapax.job_state('leased') THEN
        RETURN 0;
    END IF;
    SELECT * INTO h FROM hapax.handler x WHERE x.handler = j.handler;
    why := left(why, 1200);
    PERFORM hapax.note_attempt(j, 'failed', at, why, of_status, of_answer);
    -- The wait before the attempt after the next step; null after the last step.
    scheduled := h.retry[j.steps + 2];
    unsent := j.attempt - j.earlier_attempts - j.steps - j.lost;
    IF how = 4 AND unsent <= 20 THEN
        UPDATE hapax.job SET state = hapax.job_state('ready'), error = why, exclusive = false,
            due_at = at + least(2 ^ least(greatest(unsent - 1, 0), 16), 300)
                * (0.8 + 0.4 * dice) * interval '1 second'
        WHERE job = of_job;
    ELSIF scheduled IS NULL OR how = 3 THEN
        UPDATE hapax.job
        SET state = hapax.job_state('dead'), due_at = at, steps = steps + 1, error = why,
            exclusive = false
        WHERE job = of_job;
    ELSE
        micros := scheduled * (0.8 + 0.4 * dice);
        micros := CASE how WHEN 1 THEN greatest(micros, wait) WHEN 2 THEN wait ELSE micros END;
        UPDATE hapax.job
        SET state = hapax.job_state('ready'), due_at = at + micros * interval '1 microsecond',
            steps = steps + 1, error = why, exclusive = false
        WHERE job = of_job;
    END IF;
    IF j.resource IS NOT NULL AND hapax.ready_next(h, j.lane, j.resource, at) THEN
        RETURN 3;
    END IF;
    RETURN 1;
END $$;
