-- Merges the separate rows of owners; the janitor calls it.
CREATE OR REPLACE FUNCTION hapax.merge_usage() RETURNS void
LANGUAGE sql SET search_path = pg_catalog, pg_temp AS $$
    SELECT hapax.merge_usage_of(x.owner)
    FROM (SELECT DISTINCT u.owner FROM hapax.key_usage u WHERE u.slot <> 0 LIMIT 1000) x;
$$;
