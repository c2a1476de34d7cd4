-- Silences an alert from now on. The version is raised, so that a report that is under way does not undo the
-- silence. Returns false if there is no such alert.
CREATE OR REPLACE FUNCTION hapax.silence_alert(
    of_key text, span_us bigint, reason text, who text, now_at timestamptz DEFAULT NULL)
RETURNS boolean
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
#variable_conflict use_column
BEGIN
    UPDATE hapax.alert_board b SET version = b.version + 1;
    UPDATE hapax.alert a
    SET silenced_until = coalesce(now_at, clock_timestamp()) + span_us * interval '1 microsecond',
        silence_reason = reason, silenced_by = who
    WHERE a.key = of_key;
    RETURN FOUND;
END $$;
