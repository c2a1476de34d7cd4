-- Keeps: a message is whole until the horizon `before`, and as long as one of its deliveries is open, dead,
-- or ended after that horizon. Its deliveries, attempts and actions are deleted with its bytes; its id stays
-- known. Checks at most `most` whole messages with numbers above `after`. Returns the last number that was
-- checked, or null at the end of a round.
CREATE OR REPLACE FUNCTION hapax.strip_messages(after bigint, before timestamptz, most integer)
RETURNS bigint
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    looked bigint[];
    old bigint[];
    is_last boolean;
BEGIN
    PERFORM hapax.commit_without_sync();
    SELECT coalesce(array_agg(l.message ORDER BY l.message), '{}'),
           coalesce(array_agg(l.message) FILTER (WHERE l.created_at < before), '{}')
    INTO looked, old
    FROM (
        SELECT m.message, m.created_at FROM hapax.message m
        WHERE m.body IS NOT NULL AND m.message > after
        ORDER BY m.message LIMIT most) l;
    is_last := cardinality(looked) < most OR cardinality(old) < cardinality(looked);
    SELECT coalesce(array_agg(o.message), '{}') INTO old FROM (
        SELECT m.message FROM hapax.message m
        -- LIMIT 1 makes this one probe of the index for each message.
        WHERE m.message = ANY (old) AND (
            SELECT d.message FROM hapax.delivery d
            WHERE d.message = m.message
              AND (d.due_at >= before OR d.state NOT IN (
                      hapax.delivery_state('delivered'), hapax.delivery_state('cancelled')))
            LIMIT 1) IS NULL
        ORDER BY m.message FOR UPDATE SKIP LOCKED) o;
    -- The rows are locked, so that no replay begins meanwhile; a replay that began first keeps its
    -- message.
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
    UPDATE hapax.message m SET body = NULL, thin = NULL WHERE m.message = ANY (old);
    RETURN CASE WHEN NOT is_last THEN looked[cardinality(looked)] END;
END $$;
