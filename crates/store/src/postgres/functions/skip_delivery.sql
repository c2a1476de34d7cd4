-- Gives up one delivery that waits or is dead, so that the next one under its key is sent. Returns 0 if
-- there is no such delivery, 1 if it is cancelled, 2 if an attempt is under way, 3 if it had ended before.
-- The fence stays valid: if an
-- earlier request got through, the delivery is delivered.
CREATE OR REPLACE FUNCTION hapax.skip_delivery(
    of_id uuid, of_message bigint, of_endpoint integer, who text, reason text, acted_at timestamptz,
    now_at timestamptz DEFAULT NULL)
RETURNS integer
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    at CONSTANT timestamptz := coalesce(now_at, statement_timestamp());
    d hapax.delivery;
    verdict integer;
BEGIN
    SELECT x.* INTO d FROM hapax.delivery x JOIN hapax.message m ON m.message = x.message
    WHERE x.message = of_message AND x.endpoint = of_endpoint
      AND hapax.delivery_id(m.created_at, m.fingerprint, x.message, x.endpoint) = of_id
    FOR UPDATE OF x;
    IF NOT FOUND THEN
        RETURN 0;
    END IF;
    verdict := CASE
        WHEN d.state = hapax.delivery_state('leased') THEN 2
        WHEN d.state IN (hapax.delivery_state('delivered'), hapax.delivery_state('cancelled')) THEN 3
        ELSE 1 END;
    IF verdict = 1 THEN
        UPDATE hapax.delivery x
        SET state = hapax.delivery_state('cancelled'), due_at = at,
            error = coalesce(skip_delivery.reason, 'skipped by ' || skip_delivery.who)
        WHERE x.message = of_message AND x.endpoint = of_endpoint;
        INSERT INTO hapax.sending_action (endpoint, message, what, who, reason, at)
        VALUES (of_endpoint, of_message, 'skip', skip_delivery.who, skip_delivery.reason, acted_at);
    END IF;
    IF d.key IS NOT NULL THEN
        PERFORM hapax.ready_next_delivery(of_endpoint, d.key, at);
    END IF;
    RETURN verdict;
END $$;
