-- Cancels the open deliveries of a message (act 0), or sends again those that are not delivered (act 1).
-- Returns the ids of the changed deliveries; null if there is no such message. The fence of a cancelled
-- delivery stays valid: if the request got through, the delivery is delivered. An act that changed
-- nothing is not recorded.
CREATE OR REPLACE FUNCTION hapax.change_message(
    of_tenant text, of_id text, act integer, who text, reason text, acted_at timestamptz,
    now_at timestamptz DEFAULT NULL)
RETURNS uuid[]
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    at CONSTANT timestamptz := coalesce(now_at, statement_timestamp());
    m record;
    d hapax.delivery;
    e record;
    is_changed boolean;
    changed uuid[] := '{}';
BEGIN
    SELECT x.message, x.created_at, x.fingerprint, x.key INTO m FROM hapax.message x
    WHERE x.id = of_id AND x.tenant = of_tenant;
    IF NOT FOUND THEN
        RETURN NULL;
    END IF;
    IF act = 1 THEN
        PERFORM hapax.key_lock(of_tenant, m.key);
    END IF;
    FOR d IN
        SELECT x.* FROM hapax.delivery x WHERE x.message = m.message ORDER BY x.endpoint FOR UPDATE
    LOOP
        IF act = 0 THEN
            UPDATE hapax.delivery x
            SET state = hapax.delivery_state('cancelled'), due_at = at,
                error = coalesce(change_message.reason, 'cancelled by ' || change_message.who)
            WHERE x.message = d.message AND x.endpoint = d.endpoint
              AND d.state IN (hapax.delivery_state('ready'), hapax.delivery_state('leased'),
                              hapax.delivery_state('parked'));
            is_changed := FOUND;
        ELSE
            SELECT x.parks_dead INTO e FROM hapax.endpoint x
            WHERE x.endpoint = d.endpoint AND x.deleted_at IS NULL;
            is_changed := FOUND AND d.state <> hapax.delivery_state('delivered');
            is_changed := is_changed AND hapax.send_again(d, e.parks_dead, at);
        END IF;
        IF d.key IS NOT NULL THEN
            PERFORM hapax.ready_next_delivery(d.endpoint, d.key, at);
        END IF;
        IF is_changed THEN
            changed := changed
                || hapax.delivery_id(m.created_at, m.fingerprint, d.message, d.endpoint);
        END IF;
    END LOOP;
    IF changed <> '{}' THEN
        INSERT INTO hapax.sending_action (message, what, who, reason, at)
        VALUES (m.message, CASE act WHEN 0 THEN 'cancel' ELSE 'replay' END, change_message.who,
                change_message.reason, acted_at);
    END IF;
    RETURN changed;
END $$;
