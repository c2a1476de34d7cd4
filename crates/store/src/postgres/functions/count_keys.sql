-- Adds keys and bytes to the usage of a caller and of its API.
CREATE OR REPLACE FUNCTION hapax.count_keys(owner text, keys bigint, bytes bigint) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    callers CONSTANT bigint := hapax.count_usage(owner, keys, bytes, 0);
BEGIN
    PERFORM hapax.count_usage(split_part(owner, '/', 1), keys, bytes, callers);
END $$;
