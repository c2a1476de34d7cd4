-- The endpoints with a due delivery that this node may send to now, by circuit, block and rate, at most `most`:
-- first those after after_endpoint, then from the start up to it. Each endpoint takes one probe of the index,
-- however many deliveries wait for it. A deleted endpoint with a ready delivery, which was committed after
-- the deletion, is noted for hapax.cancel_orphans. known_endpoints and known_since: see hapax.exchange.
-- last_endpoint: the last one that was probed. is_all: no endpoint was left out. next_due: the earliest time
-- at which another probed endpoint may be sent a delivery; null if there is none.
CREATE OR REPLACE FUNCTION hapax.due_endpoints(
    most integer, after_endpoint integer, vault_keys bigint[], known_endpoints integer[],
    known_since timestamptz[], at timestamptz,
    OUT endpoints integer[], OUT last_endpoint integer, OUT is_all boolean, OUT next_due timestamptz)
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    wrapped boolean := false;
    next_known integer;
    next_endpoint integer;
    first_due timestamptz;
    open_from timestamptz;
    is_gone boolean;
BEGIN
    endpoints := '{}';
    last_endpoint := after_endpoint;
    is_all := false;
    FOR look IN 1..1024 LOOP
        EXIT WHEN cardinality(endpoints) >= most;
        SELECT min(k) INTO next_known FROM unnest(known_endpoints) k WHERE k > last_endpoint;
        SELECT d.endpoint, d.due_at INTO next_endpoint, first_due FROM hapax.delivery d
        WHERE d.state = hapax.delivery_state('ready') AND d.endpoint > last_endpoint
          AND d.endpoint < coalesce(next_known, 2147483647)
        ORDER BY d.endpoint, d.due_at, d.message LIMIT 1;
        IF NOT FOUND AND next_known IS NOT NULL THEN
            next_endpoint := next_known;
            SELECT d.due_at INTO first_due FROM hapax.delivery d
            WHERE d.endpoint = next_known AND d.state = hapax.delivery_state('ready')
              AND d.due_at >= known_since[array_position(known_endpoints, next_known)]
            ORDER BY d.due_at, d.message LIMIT 1;
            IF NOT FOUND AND (NOT wrapped OR next_known <= after_endpoint) THEN
                last_endpoint := next_known;
                CONTINUE;
            END IF;
        ELSIF NOT FOUND THEN
            is_all := wrapped;
            EXIT WHEN wrapped;
            wrapped := true;
            last_endpoint := 0;
            CONTINUE;
        END IF;
        is_all := wrapped AND next_endpoint > after_endpoint;
        EXIT WHEN is_all;
        last_endpoint := next_endpoint;
        SELECT greatest(s.blocked_until, s.open_until,
                        CASE WHEN e.rate_interval > 0 OR s.spread_until > at
                             THEN hapax.rate_next_at(s.rate_at) END),
            e.deleted_at IS NOT NULL
        INTO open_from, is_gone
        FROM hapax.endpoint e JOIN hapax.endpoint_state s ON s.endpoint = e.endpoint
        WHERE e.endpoint = next_endpoint AND (e.disabled_at IS NULL OR e.deleted_at IS NOT NULL)
          AND e.key_ids <@ vault_keys;
        IF NOT FOUND THEN
            -- Adjacent disabled endpoints are skipped in one step.
            SELECT e.endpoint - 1 INTO last_endpoint FROM hapax.endpoint e
            WHERE e.endpoint > next_endpoint AND e.disabled_at IS NULL AND e.deleted_at IS NULL
            ORDER BY e.endpoint LIMIT 1;
            last_endpoint := coalesce(last_endpoint, 2147483647);
            CONTINUE;
        END IF;
        IF is_gone THEN
            UPDATE hapax.endpoint e SET orphans = true WHERE e.endpoint = next_endpoint AND NOT e.orphans;
            CONTINUE;
        END IF;
        first_due := greatest(first_due, open_from);
        IF first_due <= at THEN
            endpoints := endpoints || next_endpoint;
        ELSE
            next_due := least(next_due, first_due);
        END IF;
    END LOOP;
END $$;
