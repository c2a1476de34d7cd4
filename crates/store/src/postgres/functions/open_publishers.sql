-- The transactions that have written messages and have not ended, by their virtual ids. Their messages cannot be
-- seen yet.
CREATE OR REPLACE FUNCTION hapax.open_publishers() RETURNS text[]
LANGUAGE sql VOLATILE SET search_path = pg_catalog, pg_temp AS $$
    SELECT coalesce(array_agg(DISTINCT l.virtualtransaction), '{}') FROM pg_locks l
    WHERE l.locktype = 'relation' AND l.relation = 'hapax.message'::regclass
      AND l.database = (SELECT d.oid FROM pg_database d WHERE d.datname = current_database())
      AND l.mode = 'RowExclusiveLock' AND l.granted AND l.pid IS DISTINCT FROM pg_backend_pid();
$$;
