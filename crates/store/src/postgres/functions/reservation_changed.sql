CREATE OR REPLACE FUNCTION hapax.reservation_changed() RETURNS trigger
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    IF NEW.owner IS NOT DISTINCT FROM OLD.owner THEN
        PERFORM hapax.count_keys(NEW.owner, 0, NEW.bytes - OLD.bytes);
        RETURN NULL;
    END IF;
    IF OLD.owner IS NOT NULL THEN
        PERFORM hapax.count_keys(OLD.owner, -1, -OLD.bytes);
    END IF;
    IF NEW.owner IS NOT NULL THEN
        PERFORM hapax.count_keys(NEW.owner, 1, NEW.bytes);
    END IF;
    RETURN NULL;
END $$;
