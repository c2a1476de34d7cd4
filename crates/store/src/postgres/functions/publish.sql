-- Keeps: the outbox is the caller's commit. The same id twice is one message. A keyed publish locks
-- its key until then: publish last, keys sorted. The id of the message.
CREATE OR REPLACE FUNCTION hapax.publish(
    type text, data jsonb, key text DEFAULT NULL, tenant text DEFAULT 'default',
    id text DEFAULT NULL, api_version text DEFAULT NULL)
RETURNS text
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    IF publish.type IS NULL OR publish.data IS NULL OR publish.tenant IS NULL THEN
        RAISE EXCEPTION 'hapax.publish: type, data and tenant must not be null'
            USING ERRCODE = 'null_value_not_allowed';
    ELSIF publish.type = '' OR publish.id = '' THEN
        RAISE EXCEPTION 'hapax.publish: type and id must not be empty'
            USING ERRCODE = 'invalid_parameter_value';
    ELSIF greatest(octet_length(publish.type), octet_length(publish.key), octet_length(publish.id),
                   octet_length(publish.tenant), octet_length(publish.api_version)) > 255
    THEN
        RAISE EXCEPTION 'hapax.publish: at most 255 bytes of type, key, tenant, id and api_version'
            USING ERRCODE = 'string_data_right_truncation';
    ELSIF octet_length(publish.data::text) > 1048576 THEN
        RAISE EXCEPTION 'hapax.publish: at most 1 MiB of data'
            USING ERRCODE = 'program_limit_exceeded';
    END IF;
    RETURN hapax.write_message(
        publish.tenant, coalesce(publish.id, 'msg_' || replace(gen_random_uuid()::text, '-', '')),
        publish.type, publish.data, publish.key, publish.api_version,
        hapax.worked_for(), statement_timestamp());
END $$;
