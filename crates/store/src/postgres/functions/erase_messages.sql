-- Deletes bytes, order key and deliveries of up to `most` messages of a tenant that is deleted. Returns the
-- deletion with its new position. The row stays, with the id.
CREATE OR REPLACE FUNCTION hapax.erase_messages(INOUT d hapax.tenant_deletion, most integer)
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    last_read bigint;
    seen integer;
    covered bigint[];
    whole bigint[];
BEGIN
    SELECT coalesce(array_agg(r.message ORDER BY r.message) FILTER (WHERE r.is_its), '{}'),
        max(r.message), count(*)
    INTO covered, last_read, seen
    FROM (
        SELECT m.message,
            m.tenant = d.tenant AND (m.body IS NOT NULL OR m.key IS NOT NULL) AS is_its
        FROM hapax.message m
        WHERE m.message > d.passed_message AND m.message <= d.last_message
        ORDER BY m.message LIMIT 5000) r;
    IF cardinality(covered) > most THEN
        covered := covered[1:most];
        d.passed_message := covered[most];
    ELSIF seen = 5000 THEN
        d.passed_message := last_read;
    ELSE
        d.phase := 2 /* keys of hapax.once */;
    END IF;
    SELECT coalesce(array_agg(l.message) FILTER (WHERE l.body IS NOT NULL), '{}') INTO whole FROM (
        SELECT m.message, m.body FROM hapax.message m WHERE m.message = ANY (covered)
        ORDER BY m.message FOR UPDATE) l;
    PERFORM FROM hapax.delivery x WHERE x.message = ANY (covered)
    ORDER BY x.message, x.endpoint FOR UPDATE;
    DELETE FROM hapax.delivery_attempt a WHERE a.message = ANY (covered);
    DELETE FROM hapax.delivery x WHERE x.message = ANY (covered);
    DELETE FROM hapax.sending_action a WHERE a.message = ANY (covered);
    UPDATE hapax.message m SET body = NULL, thin = NULL, key = NULL WHERE m.message = ANY (covered);
    d.messages := d.messages + cardinality(whole);
END $$;
