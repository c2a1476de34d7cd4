-- Keeps: transactions that publish under one key commit in the order of the places that they take. The lock
-- is held until the commit.
CREATE OR REPLACE FUNCTION hapax.key_lock(of_tenant text, of_key text) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    IF of_key IS NOT NULL THEN
        PERFORM pg_advisory_xact_lock(hashtextextended(of_key, hashtextextended(of_tenant, 0)));
    END IF;
END $$;
