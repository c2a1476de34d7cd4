-- Writes a message with the caller's commit. An id that was used before with other content is an error.
CREATE OR REPLACE FUNCTION hapax.publish_or_raise(
    of_tenant text, of_id text, of_type text, of_data text, of_thin text, of_key text,
    of_version text, of_event uuid, at timestamptz)
RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    written record;
BEGIN
    written := hapax.write_message(
        of_tenant, of_id, of_type, of_data, of_thin, of_key, of_version, of_event, at);
    IF written.verdict = 3 THEN
        RAISE EXCEPTION 'the message id % was used before with other content', of_id
            USING ERRCODE = 'XH002';
    END IF;
END $$;
