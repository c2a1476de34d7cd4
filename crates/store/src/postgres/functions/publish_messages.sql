-- Publishes messages of the API in one commit. Returns a row for each message, in any order: its
-- place in the arrays, and the answer of hapax.write_message. If a message must wait for another
-- transaction longer than the session's lock_timeout, all messages fail. The caller then publishes
-- each message alone.
CREATE OR REPLACE FUNCTION hapax.publish_messages(
    tenants text[], ids text[], types text[], datas text[], thins text[], keys text[],
    versions text[], now_at timestamptz DEFAULT NULL)
RETURNS TABLE (place bigint, verdict integer, deliveries integer)
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    at CONSTANT timestamptz := coalesce(now_at, statement_timestamp());
    m record;
    written record;
BEGIN
    -- Keys and ids are locked in one order everywhere, because each lock lasts until the commit.
    FOR m IN
        SELECT * FROM unnest(tenants, ids, types, datas, thins, keys, versions) WITH ORDINALITY
            x (tenant, id, type, data, thin, key, api_version, n)
        ORDER BY x.tenant, x.key NULLS FIRST, x.id, x.n
    LOOP
        written := hapax.write_message(
            m.tenant, m.id, m.type, m.data, m.thin, m.key, m.api_version, NULL, at);
        place := m.n;
        verdict := written.verdict;
        deliveries := written.deliveries;
        RETURN NEXT;
    END LOOP;
END $$;
