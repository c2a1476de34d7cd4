-- Adds new reservations to the counts of their owners. One call handles all rows of a statement,
-- because a commit holds many.
CREATE OR REPLACE FUNCTION hapax.reservation_came() RETURNS trigger
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    PERFORM hapax.count_keys(c.owner, c.keys, c.bytes)
    FROM (SELECT n.owner, count(*) AS keys, sum(n.bytes)::bigint AS bytes
          FROM came n WHERE n.owner IS NOT NULL GROUP BY n.owner ORDER BY n.owner) c;
    RETURN NULL;
END $$;
