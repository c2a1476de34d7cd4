-- Keeps: no claim of a paused handler commits after the pause was answered. A pause waits for the claims under way;
-- a claim that begins meanwhile takes nothing. paused: null ends the pause. Returns null if there is no such
-- handler, else whether anything changed.
CREATE OR REPLACE FUNCTION hapax.set_paused(
    of_source text, of_name text, paused timestamptz, who text, reason text)
RETURNS boolean
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    number integer;
BEGIN
    SELECT h.handler INTO number FROM hapax.handler h WHERE h.source = of_source AND h.name = of_name;
    IF NOT FOUND THEN
        RETURN NULL;
    END IF;
    IF paused IS NOT NULL THEN
        PERFORM pg_advisory_xact_lock(hapax.pause_lock(), number);
    END IF;
    UPDATE hapax.handler h
    SET paused_at = set_paused.paused, paused_by = set_paused.who, pause_reason = set_paused.reason
    WHERE h.handler = number AND (h.paused_at IS NULL) = (set_paused.paused IS NOT NULL);
    RETURN FOUND;
END $$;
