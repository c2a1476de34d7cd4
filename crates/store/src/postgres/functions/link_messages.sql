-- Keeps: messages that this transaction published before it completed a job are listed with the
-- job's event. hapax.unlinked, the number where the search begins, is only a hint; written_in
-- decides.
CREATE OR REPLACE FUNCTION hapax.link_messages(of_job uuid) RETURNS void
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
AS $$
DECLARE
    first CONSTANT text := current_setting('hapax.unlinked', true);
BEGIN
    IF first ~ '^[0-9]{1,18}$' THEN
        UPDATE hapax.message m SET event = j.event
        FROM hapax.job j
        WHERE j.job = of_job AND m.message >= first::bigint AND m.event IS NULL
          AND m.written_in = pg_current_xact_id();
        PERFORM set_config('hapax.unlinked', '', true);
    END IF;
    PERFORM hapax.works_for(of_job);
END $$;
