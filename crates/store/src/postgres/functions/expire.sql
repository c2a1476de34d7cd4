-- Keeps: a key of the functions until it expires by the database's clock. A key under a lease, or without an
-- expiry, stays. Deletes at most `most` of each kind; returns how many rows it deleted of the most frequent
-- kind.
CREATE OR REPLACE FUNCTION hapax.expire(most integer, now_at timestamptz DEFAULT NULL)
RETURNS integer
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    moment CONSTANT timestamptz := coalesce(now_at, statement_timestamp());
    gone integer;
    mostly integer;
BEGIN
    PERFORM hapax.commit_without_sync();
    DELETE FROM hapax.reservation r USING (
        SELECT o.scope, o.key FROM hapax.reservation o
        WHERE o.expires_at <= moment AND (o.status IS NOT NULL OR o.leased_until <= moment)
        ORDER BY o.expires_at LIMIT most FOR UPDATE SKIP LOCKED) old
    WHERE r.scope = old.scope AND r.key = old.key;
    GET DIAGNOSTICS mostly = ROW_COUNT;
    DELETE FROM hapax.once_key k USING (
        SELECT o.tenant, o.scope, o.key FROM hapax.once_key o WHERE o.expires_at <= moment
        ORDER BY o.expires_at LIMIT most FOR UPDATE SKIP LOCKED) old
    WHERE k.tenant = old.tenant AND k.scope = old.scope AND k.key = old.key;
    GET DIAGNOSTICS gone = ROW_COUNT;
    RETURN greatest(mostly, gone);
END $$;
