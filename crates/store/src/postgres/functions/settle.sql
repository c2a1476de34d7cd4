-- Keeps: "done" and the messages in one commit. `messages` are {tenant, id, type, data, key}. A message
-- without a tenant belongs to its event's tenant, so that no tenant can use up another's ids.
CREATE OR REPLACE FUNCTION hapax.settle(
    of_job uuid, of_fence bigint, of_result text, messages jsonb, now_at timestamptz DEFAULT NULL,
    of_status integer DEFAULT NULL, of_answer text DEFAULT NULL)
RETURNS integer
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    at CONSTANT timestamptz := coalesce(now_at, statement_timestamp());
    settled integer := hapax.done(of_job, of_fence, of_result, at, of_status, of_answer);
BEGIN
    IF settled IN (1, 3) AND messages IS NOT NULL THEN
        -- Keys in one order everywhere, because each is locked until the commit.
        PERFORM hapax.write_message(
            coalesce(m ->> 'tenant', e.tenant), coalesce(m ->> 'id', 'msg_' || gen_random_uuid()),
            m ->> 'type', m -> 'data', m ->> 'key', NULL, e.id, at)
        FROM hapax.job j JOIN hapax.event e ON e.id = j.event,
             jsonb_array_elements(messages) WITH ORDINALITY x (m, n)
        WHERE j.job = of_job
        ORDER BY m ->> 'key' NULLS FIRST, n;
    END IF;
    RETURN settled;
END $$;
