-- The bytes that endpoints get, as hapax_core::message::NewMessage::envelope. `data` is JSON text and
-- stays as it is; `sequence` is null for a message without a key.
CREATE OR REPLACE FUNCTION hapax.envelope(
    id text, type text, created_at timestamptz, api_version text, data text, sequence bigint)
RETURNS bytea
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    RETURN convert_to(
        '{"id":' || to_json(id) || ',"type":' || to_json(type) || ',"created_at":"'
        || hapax.time_text(created_at) || '","api_version":' || coalesce(to_json(api_version)::text, 'null') || ',"data":' || data
        || coalesce(',"sequence":' || sequence, '') || '}', 'UTF8');
END $$;
