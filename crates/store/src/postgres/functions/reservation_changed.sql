-- Moves changed reservations between the counts of their owners, with one call for each owner.
CREATE OR REPLACE FUNCTION hapax.reservation_changed() RETURNS trigger
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    PERFORM hapax.count_keys(c.owner, c.keys, c.bytes)
    FROM (SELECT b.owner, sum(b.keys)::bigint AS keys, sum(b.bytes)::bigint AS bytes
          FROM (SELECT n.owner, 1 AS keys, n.bytes FROM came n
                UNION ALL SELECT o.owner, -1, -o.bytes FROM gone o) b
          WHERE b.owner IS NOT NULL GROUP BY b.owner
          HAVING sum(b.keys) <> 0 OR sum(b.bytes) <> 0 ORDER BY b.owner) c;
    RETURN NULL;
END $$;
