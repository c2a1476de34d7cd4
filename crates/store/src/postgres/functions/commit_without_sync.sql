-- Lets this transaction commit without waiting for the disk or a standby. Only for retention: a crash
-- may bring deleted rows back, and the next round deletes them again. A later commit that waits has all
-- earlier ones on disk as well.
CREATE OR REPLACE FUNCTION hapax.commit_without_sync() RETURNS void
LANGUAGE sql SET search_path = pg_catalog, pg_temp AS $$
    SELECT set_config('synchronous_commit', 'off', true);
$$;
