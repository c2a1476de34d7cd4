-- Subtracts deleted reservations from the counts of their owners. One call covers all rows of a
-- statement, because the janitor deletes many at once.
CREATE OR REPLACE FUNCTION hapax.reservation_went() RETURNS trigger
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    PERFORM hapax.count_keys(g.owner, -count(*), -sum(g.bytes)::bigint)
    FROM gone g WHERE g.owner IS NOT NULL GROUP BY g.owner;
    RETURN NULL;
END $$;
