-- Publishes the dead deliveries of endpoints whose last message about deaths is at least an hour old. Takes
-- at most `most` endpoints, and returns how many it took.
CREATE OR REPLACE FUNCTION hapax.publish_deaths(most integer, now_at timestamptz DEFAULT NULL)
RETURNS integer
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    at CONSTANT timestamptz := coalesce(now_at, statement_timestamp());
    due integer;
    count integer := 0;
BEGIN
    FOR due IN
        SELECT l.endpoint FROM (
            SELECT s.endpoint FROM hapax.endpoint_state s
            WHERE s.deaths > 0 AND s.deaths_published_at <= at - interval '1 hour'
            LIMIT most FOR UPDATE SKIP LOCKED) l
        ORDER BY l.endpoint
    LOOP
        PERFORM hapax.publish_deaths_of(due, at);
        count := count + 1;
    END LOOP;
    RETURN count;
END $$;
