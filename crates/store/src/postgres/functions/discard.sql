-- Discards the dead letters of an event, or only that of one handler, for an operator. Returns true
-- if there was a dead letter. Then the act is recorded. died_before: a job that died at that time
-- or later stays as it is.
CREATE OR REPLACE FUNCTION hapax.discard(
    of_event uuid, of_handler text, who text, reason text, acted_at timestamptz,
    now_at timestamptz DEFAULT NULL, died_before timestamptz DEFAULT NULL)
RETURNS boolean
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    at CONSTANT timestamptz := coalesce(now_at, statement_timestamp());
BEGIN
    UPDATE hapax.job x
    SET state = hapax.job_state('discarded'), due_at = at, fence = hapax.next_fence(x.fence)
    WHERE x.job BETWEEN of_event AND hapax.last_job(of_event) AND x.state = hapax.job_state('dead')
      AND (died_before IS NULL OR x.due_at < died_before)
      AND (of_handler IS NULL
           OR (SELECT h.name FROM hapax.handler h WHERE h.handler = x.handler) = of_handler);
    IF NOT FOUND THEN
        RETURN false;
    END IF;
    INSERT INTO hapax.action (event, what, who, reason, at)
    VALUES (of_event, 'discard', discard.who, discard.reason, acted_at);
    RETURN true;
END $$;
