-- Keeps: a parked delivery is ready once every earlier one under its key has ended, in the commit that ends
-- the last of them. Called after a change of a keyed delivery whose row is locked. A claim parks a delivery
-- only while it has locked the row of the delivery that must end first. So every delivery that was parked
-- behind the changed row is visible here. The function waits only for rows at later places.
CREATE OR REPLACE FUNCTION hapax.ready_next_delivery(
    of_endpoint integer, of_key text, at timestamptz)
RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    d record;
    e record;
BEGIN
    SELECT x.keeps_order, x.parks_dead INTO e FROM hapax.endpoint x WHERE x.endpoint = of_endpoint;
    LOOP
        SELECT x.message, x.place, x.state INTO d FROM hapax.delivery x
        WHERE x.endpoint = of_endpoint AND x.key = of_key
          AND x.state IN (hapax.delivery_state('ready'), hapax.delivery_state('leased'),
                          hapax.delivery_state('parked'))
        ORDER BY x.place LIMIT 1;
        EXIT WHEN NOT FOUND OR d.state <> hapax.delivery_state('parked');
        EXIT WHEN e.keeps_order
            AND hapax.blocking_delivery(of_endpoint, of_key, d.place, e.parks_dead) IS NOT NULL;
        UPDATE hapax.delivery x SET state = hapax.delivery_state('ready'), due_at = at
        WHERE x.message = d.message AND x.endpoint = of_endpoint
          AND x.state = hapax.delivery_state('parked');
        -- If this delivery was cancelled meanwhile, the one after it is next.
        EXIT WHEN FOUND;
    END LOOP;
END $$;
