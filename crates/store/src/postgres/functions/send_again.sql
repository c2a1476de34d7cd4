-- Sends a delivery again, or now if it waits. Its row is locked. Returns whether anything changed:
-- a delivery that is due or under way, or waits for another, stays as it is. A delivery that had
-- ended goes behind all others under its key, whose lock is held, unless it is the dead one that
-- those wait for (parks_key).
CREATE OR REPLACE FUNCTION hapax.send_again(
    d hapax.delivery, parks_key boolean, at timestamptz)
RETURNS boolean
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    IF d.state = hapax.delivery_state('ready') AND d.due_at > at THEN
        UPDATE hapax.delivery x SET due_at = at
        WHERE x.message = d.message AND x.endpoint = d.endpoint;
        RETURN true;
    ELSIF d.state IN (hapax.delivery_state('ready'), hapax.delivery_state('leased'),
                      hapax.delivery_state('parked')) THEN
        RETURN false;
    ELSIF d.state = hapax.delivery_state('delivered') THEN
        -- From now on the delivery's row describes another attempt, so the last one is copied first.
        PERFORM hapax.note_delivery_attempt(d, NULL, d.took_ms, d.answer_status, d.answer);
    END IF;
    UPDATE hapax.delivery x
    SET state = hapax.delivery_state('ready'), due_at = at, fence = hapax.next_fence(x.fence),
        steps = 0, lost = 0, earlier_attempts = x.attempt, started_at = NULL, node = NULL, error = NULL, took_ms = NULL,
        answer_status = NULL, answer = NULL,
        place = CASE
            WHEN x.key IS NULL OR x.state = hapax.delivery_state('dead') AND parks_key THEN x.place
            ELSE nextval('hapax.message_number') END
    WHERE x.message = d.message AND x.endpoint = d.endpoint;
    RETURN true;
END $$;
