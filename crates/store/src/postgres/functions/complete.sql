-- Keeps: effects are committed only if the fence still holds, and once per fence. Messages that the
-- same transaction publishes, before or after, are listed with the event. A pulled job is noted in
-- hapax.completion, because no node learns of it otherwise.
CREATE OR REPLACE FUNCTION hapax.complete(job uuid, fence bigint, result text DEFAULT NULL) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    IF complete.job IS NULL OR complete.fence IS NULL THEN
        RAISE EXCEPTION 'hapax.complete: job and fence must not be null'
            USING ERRCODE = 'null_value_not_allowed';
    END IF;
    CASE hapax.done(complete.job, complete.fence, complete.result, statement_timestamp())
        WHEN 1, 3 THEN
            PERFORM hapax.link_messages(complete.job);
            INSERT INTO hapax.completion (source, received_at, attempt, steps, run, started_at, ended_at)
            SELECT e.source, e.received_at, j.attempt, j.steps, j.run, j.started_at, statement_timestamp()
            FROM hapax.job j JOIN hapax.handler h ON h.handler = j.handler JOIN hapax.event e ON e.id = j.event
            WHERE j.job = complete.job AND h.workplace = hapax.workplace('workers') AND j.started_at IS NOT NULL;
        WHEN 2 THEN
            RAISE EXCEPTION 'job % was completed before under fence %', complete.job, complete.fence
                USING ERRCODE = 'XH001';
        ELSE
            RAISE EXCEPTION 'job % is not held under fence % any more', complete.job, complete.fence
                USING ERRCODE = 'XH001',
                      HINT = 'Another worker has the job, or had: roll back what you did for it.';
    END CASE;
END $$;
