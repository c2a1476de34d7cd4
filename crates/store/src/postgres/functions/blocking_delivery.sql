-- The earlier delivery that the delivery at of_place under of_key must wait for; null if there is
-- none. With parks_dead, a dead delivery blocks too.
CREATE OR REPLACE FUNCTION hapax.blocking_delivery(
    of_endpoint integer, of_key text, of_place bigint, parks_dead boolean)
RETURNS bigint
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    found_message bigint;
BEGIN
    SELECT x.message INTO found_message FROM hapax.delivery x
    WHERE x.endpoint = of_endpoint AND x.key = of_key AND x.place < of_place
      AND x.state IN (hapax.delivery_state('ready'), hapax.delivery_state('leased'),
                      hapax.delivery_state('parked'))
    ORDER BY x.place LIMIT 1;
    IF found_message IS NULL AND parks_dead THEN
        SELECT x.message INTO found_message FROM hapax.delivery x
        WHERE x.endpoint = of_endpoint AND x.key = of_key AND x.place < of_place
          AND x.state = hapax.delivery_state('dead')
        ORDER BY x.place LIMIT 1;
    END IF;
    RETURN found_message;
END $$;
