-- Keeps: "done" and the messages in one commit. `messages` are {tenant, id, type, data, thin, key,
-- api_version}, data and thin as JSON text. A message that names no tenant belongs to the tenant of its
-- event, so that no tenant can use up another's ids. If an id was used before with other content, "done" and
-- all messages are rolled back: the attempt has failed.
CREATE OR REPLACE FUNCTION hapax.settle(
    of_job uuid, of_fence bigint, of_result text, messages jsonb, now_at timestamptz DEFAULT NULL,
    of_status integer DEFAULT NULL, of_answer text DEFAULT NULL)
RETURNS integer
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    at CONSTANT timestamptz := coalesce(now_at, statement_timestamp());
    settled integer;
BEGIN
    IF messages IS NULL THEN
        RETURN hapax.done(of_job, of_fence, of_result, at, of_status, of_answer);
    END IF;
    BEGIN
        settled := hapax.done(of_job, of_fence, of_result, at, of_status, of_answer);
        IF settled IN (1, 3) THEN
            -- Keys are locked in one order everywhere, because each lock lasts until the commit.
            PERFORM hapax.publish_or_raise(
                coalesce(m ->> 'tenant', e.tenant),
                coalesce(m ->> 'id', 'msg_' || replace(gen_random_uuid()::text, '-', '')),
                m ->> 'type', m ->> 'data', m ->> 'thin', m ->> 'key', m ->> 'api_version', e.id, at)
            FROM hapax.job j JOIN hapax.event e ON e.id = j.event,
                 jsonb_array_elements(messages) WITH ORDINALITY x (m, n)
            WHERE j.job = of_job
            ORDER BY m ->> 'key' NULLS FIRST, n;
        END IF;
    EXCEPTION WHEN SQLSTATE 'XH002' THEN
        settled := hapax.failed(
            of_job, of_fence, SQLERRM, 0, 0, random(), at, of_status, of_answer);
    END;
    RETURN settled;
END $$;
