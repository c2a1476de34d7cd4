-- Cancels a delivery that was dead, held or parked for too long, and whose row is locked. Returns whether
-- anything changed. The fence stays valid: if a request got through after all, the delivery is delivered.
-- The next delivery under its key is readied.
CREATE OR REPLACE FUNCTION hapax.expire_delivery(d hapax.delivery, at timestamptz) RETURNS boolean
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    is_changed boolean;
BEGIN
    UPDATE hapax.delivery x
    SET state = hapax.delivery_state('cancelled'), due_at = at, error = 'expired', took_ms = NULL,
        answer_status = NULL, answer = NULL
    WHERE x.message = d.message AND x.endpoint = d.endpoint
      AND d.state IN (hapax.delivery_state('ready'), hapax.delivery_state('parked'),
                      hapax.delivery_state('dead'));
    is_changed := FOUND;
    IF is_changed AND d.key IS NOT NULL THEN
        PERFORM hapax.ready_next_delivery(d.endpoint, d.key, at);
    END IF;
    RETURN is_changed;
END $$;
