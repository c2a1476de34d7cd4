-- Keeps: the message is published by the caller's commit, or not at all. The same id with the same
-- content is one message; with other content it is an error (XH002). A keyed publish locks its key
-- until the commit: publish last, keys sorted. Returns the id of the message.
CREATE OR REPLACE FUNCTION hapax.publish(
    type text, data jsonb, key text DEFAULT NULL, tenant text DEFAULT 'default',
    id text DEFAULT NULL, api_version text DEFAULT NULL)
RETURNS text
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    its_id CONSTANT text := coalesce(publish.id, 'msg_' || replace(gen_random_uuid()::text, '-', ''));
    thin CONSTANT text := '{' || concat_ws(',',
        '"id":' || (publish.data -> 'id')::text, '"object":' || (publish.data -> 'object')::text) || '}';
BEGIN
    IF publish.type IS NULL OR publish.data IS NULL OR publish.tenant IS NULL THEN
        RAISE EXCEPTION 'hapax.publish: type, data and tenant must not be null'
            USING ERRCODE = 'null_value_not_allowed';
    ELSIF '' IN (publish.type, publish.tenant, its_id) OR publish.key = '' OR publish.api_version = ''
    THEN
        RAISE EXCEPTION 'hapax.publish: type, key, tenant, id and api_version must not be empty'
            USING ERRCODE = 'invalid_parameter_value';
    ELSIF greatest(octet_length(publish.type), octet_length(publish.key), octet_length(publish.id),
                   octet_length(publish.tenant), octet_length(publish.api_version)) > 255
    THEN
        RAISE EXCEPTION 'hapax.publish: at most 255 bytes of type, key, tenant, id and api_version'
            USING ERRCODE = 'string_data_right_truncation';
    ELSIF its_id !~ '^[A-Za-z0-9_-]{1,128}$' THEN
        RAISE EXCEPTION 'hapax.publish: an id has at most 128 characters of A-Z, a-z, 0-9, _ and -'
            USING ERRCODE = 'invalid_parameter_value';
    ELSIF concat(publish.type, publish.key, publish.tenant, publish.api_version)
          ~ '[\u0001-\u001f\u007f-\u009f]'
    THEN
        RAISE EXCEPTION 'hapax.publish: type, key, tenant and api_version must not contain control characters'
            USING ERRCODE = 'invalid_parameter_value';
    ELSIF publish.tenant = 'hapax' OR starts_with(publish.type, 'hapax.') THEN
        RAISE EXCEPTION 'hapax.publish: the tenant hapax and types hapax.* are reserved for messages of Hapax itself'
            USING ERRCODE = 'invalid_parameter_value';
    ELSIF octet_length(publish.data::text) > 1048576 THEN
        RAISE EXCEPTION 'hapax.publish: at most 1 MiB of data'
            USING ERRCODE = 'program_limit_exceeded';
    END IF;
    PERFORM hapax.publish_or_raise(
        publish.tenant, its_id, publish.type, publish.data::text, thin, publish.key,
        publish.api_version, hapax.worked_for(), statement_timestamp());
    RETURN its_id;
END $$;
