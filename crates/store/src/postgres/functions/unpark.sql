-- Readies up to 256 parked deliveries of an endpoint whose order was changed: the next claim judges them
-- again. The caller has locked the row of endpoint_state, so nothing is parked meanwhile. A locked
-- delivery is being changed, and that change calls hapax.ready_next_delivery.
CREATE OR REPLACE FUNCTION hapax.unpark(of_endpoint integer, at timestamptz) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    most CONSTANT integer := 256;
    first_message bigint;
    looked integer;
    last_message bigint;
BEGIN
    SELECT s.unpark_from INTO first_message FROM hapax.endpoint_state s WHERE s.endpoint = of_endpoint;
    SELECT count(*), max(p.message) INTO looked, last_message FROM (
        SELECT x.message FROM hapax.delivery x
        WHERE x.endpoint = of_endpoint AND x.state = hapax.delivery_state('parked')
          AND x.message >= first_message
        ORDER BY x.message LIMIT most) p;
    UPDATE hapax.delivery x SET state = hapax.delivery_state('ready'), due_at = at
    WHERE x.endpoint = of_endpoint AND x.message IN (
        SELECT l.message FROM hapax.delivery l
        WHERE l.endpoint = of_endpoint AND l.state = hapax.delivery_state('parked')
          AND l.message BETWEEN first_message AND last_message
        ORDER BY l.message FOR UPDATE SKIP LOCKED);
    UPDATE hapax.endpoint_state s
    SET unpark_from = CASE WHEN looked = most THEN last_message + 1 END
    WHERE s.endpoint = of_endpoint;
END $$;
