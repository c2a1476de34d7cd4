CREATE OR REPLACE FUNCTION hapax.reservation_came() RETURNS trigger
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    PERFORM hapax.count_keys(NEW.owner, 1, NEW.bytes);
    RETURN NULL;
END $$;
