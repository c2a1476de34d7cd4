-- Keeps: a message as long as the history of its time, and as long as one of its deliveries is open, dead,
-- or ended since. Deliveries and attempts go with it. At most `most`; how many.
CREATE OR REPLACE FUNCTION hapax.expire_messages(before timestamptz, most integer) RETURNS integer
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    old bigint[];
BEGIN
    SELECT coalesce(array_agg(o.message), '{}') INTO old FROM (
        SELECT m.message FROM hapax.message m
        WHERE m.created_at < before AND NOT EXISTS (
            SELECT FROM hapax.delivery d
            WHERE d.message = m.message
              AND (d.due_at >= before OR d.state NOT IN (
                      hapax.delivery_state('delivered'), hapax.delivery_state('cancelled'))))
        ORDER BY m.created_at LIMIT most FOR UPDATE SKIP LOCKED) o;
    -- Locked, so that no replay begins meanwhile; one that began first keeps its message.
    SELECT coalesce(array_agg(m), '{}') INTO old FROM unnest(old) m
    WHERE m NOT IN (
        SELECT l.message FROM (
            SELECT d.message, d.state FROM hapax.delivery d WHERE d.message = ANY (old)
            ORDER BY d.message, d.endpoint FOR UPDATE) l
        WHERE l.state NOT IN (
            hapax.delivery_state('delivered'), hapax.delivery_state('cancelled')));
    DELETE FROM hapax.delivery_attempt a WHERE a.message = ANY (old);
    DELETE FROM hapax.delivery d WHERE d.message = ANY (old);
    DELETE FROM hapax.sending_action a WHERE a.message = ANY (old);
    DELETE FROM hapax.message m WHERE m.message = ANY (old);
    RETURN cardinality(old);
END $$;
