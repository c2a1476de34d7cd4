-- Ends up to 256 leases of deliveries that ran out, also those of disabled and deleted endpoints. A locked
-- delivery is being settled and is skipped. Whether there may be more.
CREATE OR REPLACE FUNCTION hapax.end_delivery_leases(at timestamptz) RETURNS boolean
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    most CONSTANT integer := 256;
    ended integer := 0;
    d hapax.delivery;
BEGIN
    FOR d IN
        SELECT * FROM hapax.delivery x
        WHERE x.state = hapax.delivery_state('leased') AND x.due_at <= at
        ORDER BY x.due_at LIMIT most
        FOR UPDATE SKIP LOCKED
    LOOP
        PERFORM hapax.lose_delivery(d, random(), at);
        -- An earlier one under its key may be parked behind it: the endpoint kept no order when it was sent.
        IF d.key IS NOT NULL THEN
            PERFORM hapax.ready_next_delivery(d.endpoint, d.key, at);
        END IF;
        ended := ended + 1;
    END LOOP;
    RETURN ended = most;
END $$;
