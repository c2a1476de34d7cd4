-- Records how an attempt ended. A later record of the same attempt replaces the earlier one.
CREATE OR REPLACE FUNCTION hapax.note_attempt(
    j hapax.job, outcome text, ended_at timestamptz, error text,
    answer_status integer DEFAULT NULL, answer text DEFAULT NULL)
RETURNS void
LANGUAGE sql SET search_path = pg_catalog, pg_temp AS $$
    INSERT INTO hapax.attempt (job, run, attempt, started_at, ended_at, outcome, error, worker,
                               answer_status, answer)
    VALUES (j.job, j.run, j.attempt, coalesce(j.started_at, ended_at, j.due_at), ended_at, outcome,
            error, coalesce(j.worker, ''), answer_status, answer)
    ON CONFLICT (job, run, attempt) DO UPDATE
    SET ended_at = excluded.ended_at, outcome = excluded.outcome, error = excluded.error,
        answer_status = excluded.answer_status, answer = excluded.answer;
$$;
