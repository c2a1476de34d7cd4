-- Counts a dead delivery of an endpoint, and publishes the count unless the last message about the endpoint
-- is too recent. Locks the endpoint's state. If no endpoint wants such messages, nothing is counted.
CREATE OR REPLACE FUNCTION hapax.note_death(of_endpoint integer, at timestamptz) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    IF NOT hapax.wants_own('hapax.delivery.dead') THEN
        RETURN;
    END IF;
    UPDATE hapax.endpoint_state s
    SET deaths = s.deaths + 1, died_since = coalesce(s.died_since, at)
    FROM hapax.endpoint e
    WHERE s.endpoint = of_endpoint AND e.endpoint = of_endpoint AND e.tenant <> 'hapax'
      AND e.deleted_at IS NULL;
    PERFORM hapax.publish_deaths_of(of_endpoint, at);
END $$;
