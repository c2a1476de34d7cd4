-- Publishes a message of Hapax itself with the caller's commit, if an endpoint of the tenant hapax wants it.
CREATE OR REPLACE FUNCTION hapax.publish_own(of_type text, of_data text, of_key text, at timestamptz)
RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    IF hapax.wants_own(of_type) THEN
        PERFORM hapax.write_message(
            'hapax', 'msg_' || replace(gen_random_uuid()::text, '-', ''), of_type, of_data, '{}', of_key,
            NULL, NULL, at);
    END IF;
END $$;
