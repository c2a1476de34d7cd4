-- Sends one delivery again, or now if it waits. Returns 0 if there is no such delivery, 1 if it is due
-- now, 2 if it was due or under way already, 3 if its endpoint was deleted.
CREATE OR REPLACE FUNCTION hapax.replay_delivery(
    of_id uuid, of_message bigint, of_endpoint integer, who text, reason text, acted_at timestamptz,
    now_at timestamptz DEFAULT NULL)
RETURNS integer
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    at CONSTANT timestamptz := coalesce(now_at, statement_timestamp());
    d hapax.delivery;
    e record;
    is_changed boolean;
BEGIN
    PERFORM hapax.key_lock(m.tenant, m.key) FROM hapax.message m WHERE m.message = of_message;
    SELECT x.* INTO d FROM hapax.delivery x JOIN hapax.message m ON m.message = x.message
    WHERE x.message = of_message AND x.endpoint = of_endpoint
      AND hapax.delivery_id(m.created_at, m.fingerprint, x.message, x.endpoint) = of_id
    FOR UPDATE OF x;
    IF NOT FOUND THEN
        RETURN 0;
    END IF;
    SELECT x.parks_dead INTO e FROM hapax.endpoint x
    WHERE x.endpoint = of_endpoint AND x.deleted_at IS NULL;
    IF NOT FOUND THEN
        RETURN 3;
    END IF;
    is_changed := hapax.send_again(d, e.parks_dead, at);
    IF d.key IS NOT NULL THEN
        PERFORM hapax.ready_next_delivery(of_endpoint, d.key, at);
    END IF;
    IF NOT is_changed THEN
        RETURN 2;
    END IF;
    INSERT INTO hapax.sending_action (endpoint, message, what, who, reason, at)
    VALUES (of_endpoint, of_message, 'replay', replay_delivery.who, replay_delivery.reason, acted_at);
    RETURN 1;
END $$;
