-- Keeps: one message per tenant and id, with one delivery for each endpoint that wants it now, in the
-- commit that publishes it. The unique index decides the race. Publishers under the same key wait for
-- each other, so that the order of commits is that of the numbers. No endpoint is locked.
-- of_thin: the data that endpoints with thin payloads get. verdict: 1 it is new, 2 the same message was
-- published before, 3 the id was used before with other content. hapax.unlinked: the number from which
-- this transaction has messages that belong to no event.
CREATE OR REPLACE FUNCTION hapax.write_message(
    of_tenant text, of_id text, of_type text, of_data text, of_thin text, of_key text,
    of_version text, of_event uuid, at timestamptz, OUT verdict integer, OUT deliveries integer)
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
-- The statement is planned once in a session, in a way that works for large tables too.
SET enable_seqscan = off
SET plan_cache_mode = force_generic_plan
AS $$
#variable_conflict use_column
DECLARE
    print CONSTANT uuid := hapax.message_fingerprint(of_type, of_key, of_version, of_data);
    first CONSTANT text := current_setting('hapax.unlinked', true);
    number bigint;
    place bigint;
    targets integer[];
    wants_thin boolean;
    known record;
BEGIN
    PERFORM hapax.key_lock(of_tenant, of_key);
    SELECT coalesce(array_agg(e.endpoint), '{}'), coalesce(bool_or(e.is_thin), false)
    INTO targets, wants_thin
    FROM hapax.endpoint e
    WHERE e.tenant = of_tenant AND e.deleted_at IS NULL
      AND (e.types = '{}' OR of_type COLLATE "C" LIKE ANY (e.types))
      AND (e.api_version IS NULL OR of_version IS NULL OR e.api_version = of_version);
    LOOP
        number := nextval('hapax.message_number');
        place := CASE WHEN of_key IS NOT NULL THEN number END;
        INSERT INTO hapax.message (message, tenant, id, type, key, api_version, fingerprint, event,
                                   deliveries, created_at, body, thin)
        VALUES (number, of_tenant, of_id, of_type, of_key, of_version, print, of_event,
                cardinality(targets), at,
                hapax.envelope(of_id, of_type, at, of_version, of_data, place),
                CASE WHEN wants_thin
                     THEN hapax.envelope(of_id, of_type, at, of_version, of_thin, place) END)
        ON CONFLICT (id, tenant) DO NOTHING;
        EXIT WHEN FOUND;
        SELECT m.fingerprint, m.deliveries INTO known FROM hapax.message m
        WHERE m.id = of_id AND m.tenant = of_tenant;
        -- If the message is missing, retention has just deleted it.
        IF FOUND THEN
            verdict := CASE WHEN known.fingerprint = print THEN 2 ELSE 3 END;
            deliveries := known.deliveries;
            RETURN;
        END IF;
    END LOOP;
    INSERT INTO hapax.delivery (message, endpoint, state, due_at, key, place)
    SELECT number, e.endpoint, hapax.delivery_state('ready'),
        at + coalesce(e.retry[1], 0) * (0.8 + 0.4 * random()) * interval '1 microsecond',
        of_key, place
    FROM hapax.endpoint e WHERE e.endpoint = ANY (targets);
    IF of_event IS NULL AND (
        CASE WHEN first ~ '^[0-9]{1,18}$' THEN first::bigint > number ELSE true END)
    THEN
        PERFORM set_config('hapax.unlinked', number::text, true);
    END IF;
    verdict := 1;
    deliveries := cardinality(targets);
END $$;
