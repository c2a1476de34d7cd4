-- Keeps: no replay runs until this transaction ends. Returns false if a running replay does not end
-- within a second. Such a replay waits for a user's transaction, and other transactions must not
-- wait with it.
CREATE OR REPLACE FUNCTION hapax.exclude_replays() RETURNS boolean
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
SET lock_timeout = '1s'
AS $$
BEGIN
    PERFORM pg_advisory_xact_lock(hapax.replay_lock());
    RETURN true;
EXCEPTION WHEN lock_not_available THEN
    RETURN false;
END $$;
