-- Lets this transaction commit without waiting for the disk or a standby. Only for retention: a crash may
-- bring back what it deleted, and the next round deletes that again. Whatever commits later and waits
-- has everything before it on disk as well.
CREATE OR REPLACE FUNCTION hapax.commit_behind() RETURNS void
LANGUAGE sql SET search_path = pg_catalog, pg_temp AS $$
    SELECT set_config('synchronous_commit', 'off', true);
$$;
