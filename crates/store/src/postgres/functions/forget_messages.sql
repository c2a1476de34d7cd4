-- Keeps: the id of a message until its horizon, and while the message is whole. Deletes at most `most`;
-- returns how many.
CREATE OR REPLACE FUNCTION hapax.forget_messages(before timestamptz, most integer) RETURNS integer
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    gone integer;
BEGIN
    PERFORM hapax.commit_without_sync();
    DELETE FROM hapax.message m USING (
        SELECT o.message FROM hapax.message o WHERE o.body IS NULL AND o.created_at < before
        ORDER BY o.created_at LIMIT most FOR UPDATE SKIP LOCKED) old
    WHERE m.message = old.message;
    GET DIAGNOSTICS gone = ROW_COUNT;
    RETURN gone;
END $$;
