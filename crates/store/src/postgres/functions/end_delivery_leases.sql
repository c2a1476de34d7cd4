-- Ends up to 256 leases of deliveries that ran out, no earlier than `since` (see hapax.exchange), including
-- those of disabled and deleted endpoints. A locked delivery is being settled and is skipped. ended: how
-- many leases; has_more: there may be more; ended_until: no lease that is left ends before this time.
CREATE OR REPLACE FUNCTION hapax.end_delivery_leases(
    since timestamptz, at timestamptz,
    OUT ended integer, OUT has_more boolean, OUT ended_until timestamptz)
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    most CONSTANT integer := 256;
    d hapax.delivery;
BEGIN
    ended := 0;
    FOR d IN
        SELECT * FROM hapax.delivery x
        WHERE x.state = hapax.delivery_state('leased') AND x.due_at <= at
          AND x.due_at >= coalesce(since, '-infinity')
        ORDER BY x.due_at LIMIT most
        FOR UPDATE SKIP LOCKED
    LOOP
        PERFORM hapax.lose_delivery(d, random(), at);
        -- An earlier delivery under the key may be parked behind this one: the endpoint kept no
        -- order when this one was sent.
        IF d.key IS NOT NULL THEN
            PERFORM hapax.ready_next_delivery(d.endpoint, d.key, at);
        END IF;
        ended := ended + 1;
        ended_until := d.due_at;
    END LOOP;
    has_more := ended = most;
    IF NOT has_more THEN
        ended_until := at - hapax.commit_slack();
    END IF;
END $$;
