-- The seal of the setting that names the job which a transaction works for. The seal is made under a
-- key that only this schema's owner can read, and covers the transaction. A value that a session sets
-- by hand, or leaves behind, is ignored.
CREATE OR REPLACE FUNCTION hapax.seal_of(of_job uuid) RETURNS text
LANGUAGE sql SET search_path = pg_catalog, pg_temp AS $$
    SELECT encode(sha256(
        e.cache_key || uuid_send(of_job) || convert_to(pg_current_xact_id()::text, 'UTF8')), 'hex')
    FROM hapax.epoch e;
$$;
