-- Recognises the content of a message, as hapax_core::message::NewMessage::fingerprint.
CREATE OR REPLACE FUNCTION hapax.message_fingerprint(type text, key text, api_version text, data text)
RETURNS uuid
LANGUAGE plpgsql IMMUTABLE SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    RETURN hapax.key_hash(
        'message content', convert_to(type, 'UTF8'),
        coalesce('\x01'::bytea || convert_to(key, 'UTF8'), '\x00'),
        coalesce('\x01'::bytea || convert_to(api_version, 'UTF8'), '\x00'),
        convert_to(data, 'UTF8'));
END $$;
