-- Records how an attempt at a delivery ended. A later record of the same attempt replaces the earlier one.
CREATE OR REPLACE FUNCTION hapax.note_delivery_attempt(
    d hapax.delivery, of_error text, of_took bigint, of_status integer, of_answer text)
RETURNS void
LANGUAGE sql SET search_path = pg_catalog, pg_temp AS $$
    INSERT INTO hapax.delivery_attempt (message, endpoint, attempt, started_at, took_ms, answer_status,
                                        answer, error, node)
    VALUES (d.message, d.endpoint, d.attempt, coalesce(d.started_at, d.due_at), of_took, of_status,
            of_answer, of_error, coalesce(d.node, ''))
    ON CONFLICT (message, endpoint, attempt) DO UPDATE
    SET took_ms = excluded.took_ms, answer_status = excluded.answer_status, answer = excluded.answer,
        error = excluded.error;
$$;
