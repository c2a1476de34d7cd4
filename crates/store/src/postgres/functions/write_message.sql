-- Records a message with the commit that publishes it. The same id twice is one message. Publishers
-- under the same key wait for each other, so that the order of commits is that of the numbers.
-- hapax.unlinked: the first number of this transaction's messages without an event.
CREATE OR REPLACE FUNCTION hapax.write_message(
    of_tenant text, of_id text, of_type text, of_data jsonb, of_key text, of_version text,
    of_event uuid, at timestamptz)
RETURNS text
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    written bigint;
    first CONSTANT text := current_setting('hapax.unlinked', true);
BEGIN
    IF of_key IS NOT NULL THEN
        PERFORM pg_advisory_xact_lock(hashtextextended(of_key, hashtextextended(of_tenant, 0)));
    END IF;
    INSERT INTO hapax.message (tenant, id, type, data, key, api_version, event, created_at)
    VALUES (of_tenant, of_id, of_type, of_data, of_key, of_version, of_event, at)
    ON CONFLICT (tenant, id) DO NOTHING
    RETURNING message INTO written;
    IF of_event IS NULL AND written IS NOT NULL AND (
        CASE WHEN first ~ '^[0-9]{1,18}$' THEN first::bigint > written ELSE true END)
    THEN
        PERFORM set_config('hapax.unlinked', written::text, true);
    END IF;
    RETURN of_id;
END $$;
