-- The event that this transaction works for; null if works_for was not called.
CREATE OR REPLACE FUNCTION hapax.worked_for() RETURNS uuid
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    said CONSTANT text := current_setting('hapax.job', true);
    of_event uuid;
BEGIN
    IF said ~ '^[0-9a-f-]{36} [0-9a-f]{64}$' AND substr(said, 38) = hapax.seal_of(left(said, 36)::uuid)
    THEN
        SELECT j.event INTO of_event FROM hapax.job j WHERE j.job = left(said, 36)::uuid;
    END IF;
    RETURN of_event;
END $$;
