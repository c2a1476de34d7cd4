-- Whether an endpoint with these types and this version gets a message. The rule is that of
-- hapax.write_message.
CREATE OR REPLACE FUNCTION hapax.wants_message(
    of_types text[], of_api_version text, message_type text, message_version text)
RETURNS boolean
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp AS $$
    SELECT (of_types = '{}' OR message_type COLLATE "C" LIKE ANY (of_types))
       AND (of_api_version IS NULL OR message_version IS NULL OR of_api_version = message_version);
$$;
