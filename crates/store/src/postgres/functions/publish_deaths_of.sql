-- Keeps: one message an hour about dead deliveries of an endpoint. Publishes how many deliveries
-- died since the last message. Locks the endpoint's state.
CREATE OR REPLACE FUNCTION hapax.publish_deaths_of(of_endpoint integer, at timestamptz) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    died record;
BEGIN
    SELECT s.deaths, s.died_since, e.id, e.tenant, e.deleted_at INTO died
    FROM hapax.endpoint_state s JOIN hapax.endpoint e ON e.endpoint = s.endpoint
    WHERE s.endpoint = of_endpoint AND s.deaths > 0
      AND coalesce(s.deaths_published_at <= at - interval '1 hour', true)
    FOR UPDATE OF s;
    IF NOT FOUND THEN
        RETURN;
    END IF;
    UPDATE hapax.endpoint_state s
    SET deaths = 0, died_since = NULL, deaths_published_at = at
    WHERE s.endpoint = of_endpoint;
    IF died.deleted_at IS NULL THEN
        PERFORM hapax.publish_own(
            'hapax.delivery.dead',
            jsonb_build_object(
                'endpoint', died.id, 'tenant', died.tenant, 'count', died.deaths,
                'since', hapax.time_text(died.died_since))::text,
            died.id::text, at);
    END IF;
END $$;
