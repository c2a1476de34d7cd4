-- Keeps: at most max_in_flight attempts at an endpoint, over all nodes; attempt + 1 and a new fence before
-- the request. Leases up to `room` due deliveries of an endpoint with about bytes_left bytes of bodies; if
-- `first`, one of them may have more. The lock of endpoint_state comes before the count: the attempts
-- under way are then all visible. An endpoint that another node claims from is skipped.
-- Keeps also: at an endpoint that keeps order, one attempt at a time under each key, at the earliest delivery
-- that has not ended. Due deliveries that must wait are parked, up to 256 besides those that are leased. A
-- delivery is parked only while the row of the delivery that it waits for is locked here, so that the end of
-- the latter finds it parked.
-- Keeps also: the rate limit, by hapax_core::rate_limit. next_at: when the rate limit lets another attempt begin.
-- Keeps also: no leased delivery of the endpoint has a lower message than endpoint_state.leased_from, so
-- that the count does not pass the dead index entries of all earlier leases. Only a holder of that row's lock
-- leases deliveries.
-- Keeps also: if `is_fast`, only a node that holds all claims of the endpoint gets claims beyond max_in_flight. A
-- sender begins at most max_in_flight attempts by itself, so the bound holds over all nodes.
-- is_busy: there are due deliveries left that could be claimed at once or soon. since: see hapax.exchange.
-- seen_until: no delivery that was due before this time is left. fences, attempts: those of the taken deliveries,
-- which are leased until leased_until.
CREATE OR REPLACE FUNCTION hapax.take_deliveries(
    of_endpoint integer, room integer, bytes_left bigint, first boolean, since timestamptz,
    of_node text, vault_keys bigint[], at timestamptz, is_fast boolean,
    OUT taken bigint[], OUT bytes bigint, OUT is_full boolean, OUT is_busy boolean,
    OUT next_at timestamptz, OUT seen_until timestamptz,
    OUT fences bigint[], OUT attempts integer[], OUT leased_until timestamptz)
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    e record;
    d record;
    free integer;
    busy_keys text[] := '{}';
    parked bigint[] := '{}';
    lowest_leased bigint;
    has_passed boolean := false;
    looked integer := 0;
    looks integer;
    least_tried integer;
    blocker bigint;
BEGIN
    taken := '{}';
    fences := '{}';
    attempts := '{}';
    bytes := 0;
    is_full := false;
    is_busy := false;
    SELECT x.max_in_flight, x.lease, x.is_thin, x.keeps_order, x.parks_dead, s.unpark_from,
        s.open_until, s.circuit, s.rate_at, s.leased_from, least(x.max_in_flight, s.slots) AS slots,
        -- Until spread_until the endpoint gets at most 100 deliveries a second.
        greatest(x.rate_interval, CASE WHEN s.spread_until > at THEN 10000 END) AS rate_interval INTO e
    FROM hapax.endpoint x JOIN hapax.endpoint_state s ON s.endpoint = x.endpoint
    WHERE x.endpoint = of_endpoint AND x.disabled_at IS NULL AND x.deleted_at IS NULL
      AND x.key_ids <@ vault_keys AND coalesce(s.blocked_until <= at, true)
      AND coalesce(s.open_until <= at, true)
    FOR UPDATE OF s SKIP LOCKED;
    IF NOT FOUND THEN
        is_busy := true;
        RETURN;
    END IF;
    IF e.unpark_from IS NOT NULL THEN
        PERFORM hapax.unpark(of_endpoint, at);
        is_busy := true;
    END IF;
    SELECT CASE WHEN is_fast AND e.slots = e.max_in_flight AND e.open_until IS NULL
                     AND coalesce(e.rate_interval, 0) = 0 AND coalesce(bool_and(x.node = of_node), true)
                THEN 4 ELSE 1 END * e.slots - count(*), min(x.message)
    INTO free, lowest_leased FROM hapax.delivery x
    WHERE x.endpoint + 0 = of_endpoint AND x.state = hapax.delivery_state('leased')
      AND x.message >= e.leased_from;
    IF e.rate_interval > 0 THEN
        -- How far the attempts so far are ahead of the rate, and how many more may begin.
        free := least(free, greatest(0, (e.rate_interval + 50000 - greatest(0,
            coalesce(EXTRACT(epoch FROM e.rate_at - at) * 1000000, 0)::bigint)) / e.rate_interval));
        next_at := hapax.rate_next_at(e.rate_at);
    END IF;
    IF least(free, room) <= 0 THEN
        RETURN;
    END IF;
    IF e.open_until IS NOT NULL THEN
        -- One delivery tries the endpoint: of those that are due longest, the one with the fewest
        -- attempts, so that a delivery that always fails does not keep the circuit open.
        free := least(free, 1);
        SELECT min(c.attempt) INTO least_tried FROM (
            SELECT x.attempt FROM hapax.delivery x
            WHERE x.endpoint = of_endpoint AND x.state = hapax.delivery_state('ready')
              AND x.due_at <= at
            ORDER BY x.due_at, x.message LIMIT 256) c;
        has_passed := true;
    END IF;
    looks := least(free, room);
    IF NOT e.keeps_order THEN
        WITH due AS (
            SELECT x.message, x.due_at,
                coalesce(octet_length(coalesce(CASE WHEN e.is_thin THEN m.thin END, m.body)), 0) AS size
            FROM hapax.delivery x JOIN hapax.message m ON m.message = x.message
            WHERE x.endpoint = of_endpoint AND x.state = hapax.delivery_state('ready') AND x.due_at <= at
              AND x.due_at >= since AND (least_tried IS NULL OR x.attempt <= least_tried)
            ORDER BY x.due_at, x.message LIMIT looks
            FOR UPDATE OF x SKIP LOCKED),
        summed AS (
            SELECT u.*, sum(u.size) OVER (ORDER BY u.due_at, u.message ROWS UNBOUNDED PRECEDING) AS size_so_far,
                row_number() OVER (ORDER BY u.due_at, u.message ROWS UNBOUNDED PRECEDING) AS n
            FROM due u),
        fitting AS (
            SELECT s.*, s.size_so_far <= bytes_left OR first AND s.n = 1 AS fits FROM summed s)
        SELECT coalesce(array_agg(f.message ORDER BY f.n) FILTER (WHERE f.fits), '{}'),
            coalesce(sum(f.size) FILTER (WHERE f.fits), 0), coalesce(bool_or(NOT f.fits), false),
            max(f.due_at) FILTER (WHERE f.fits AND NOT has_passed)
        INTO taken, bytes, is_full, seen_until FROM fitting f;
    ELSE
        looks := looks + 256;
        SELECT coalesce(array_agg(x.key), '{}') INTO busy_keys FROM hapax.delivery x
        WHERE x.endpoint + 0 = of_endpoint AND x.state = hapax.delivery_state('leased')
          AND x.message >= e.leased_from AND x.key IS NOT NULL;
        FOR d IN
            SELECT x.message, x.key, x.place, x.due_at,
                octet_length(coalesce(CASE WHEN e.is_thin THEN m.thin END, m.body)) AS size
            FROM hapax.delivery x JOIN hapax.message m ON m.message = x.message
            WHERE x.endpoint = of_endpoint AND x.state = hapax.delivery_state('ready') AND x.due_at <= at
              AND x.due_at >= since AND (least_tried IS NULL OR x.attempt <= least_tried)
            ORDER BY x.due_at, x.message LIMIT looks
            FOR UPDATE OF x SKIP LOCKED
        LOOP
            looked := looked + 1;
            IF d.key IS NOT NULL THEN
                blocker := hapax.blocking_delivery(of_endpoint, d.key, d.place, e.parks_dead);
                IF blocker IS NULL AND d.key = ANY (busy_keys) THEN
                    -- A later delivery under the key is under way: it was claimed before the endpoint
                    -- kept order.
                    SELECT x.message INTO blocker FROM hapax.delivery x
                    WHERE x.endpoint + 0 = of_endpoint AND x.state = hapax.delivery_state('leased')
                      AND x.key = d.key LIMIT 1;
                END IF;
                IF blocker IS NOT NULL THEN
                    -- The blocker may have ended since. Only a delivery that still blocks readies this
                    -- one later.
                    PERFORM FROM hapax.delivery x
                    WHERE x.message = blocker AND x.endpoint = of_endpoint
                      AND (x.state = hapax.delivery_state('leased')
                           OR x.place < d.place
                              AND (x.state IN (hapax.delivery_state('ready'), hapax.delivery_state('parked'))
                                   OR e.parks_dead AND x.state = hapax.delivery_state('dead')))
                    FOR UPDATE SKIP LOCKED;
                    IF FOUND THEN
                        parked := parked || d.message;
                    ELSE
                        -- Another transaction is ending the blocker now.
                        is_busy := true;
                        has_passed := true;
                    END IF;
                    CONTINUE;
                END IF;
            END IF;
            is_full := bytes + d.size > bytes_left AND NOT (first AND taken = '{}');
            EXIT WHEN is_full;
            seen_until := CASE WHEN NOT has_passed THEN d.due_at ELSE seen_until END;
            taken := taken || d.message;
            bytes := bytes + d.size;
            busy_keys := busy_keys || d.key;
            EXIT WHEN cardinality(taken) >= least(free, room);
        END LOOP;
    END IF;
    is_busy := is_busy OR is_full OR cardinality(taken) = room AND free > room
        OR e.keeps_order AND looked = looks AND cardinality(taken) < least(free, room);
    IF parked <> '{}' THEN
        UPDATE hapax.delivery x SET state = hapax.delivery_state('parked'), due_at = at
        FROM unnest(parked, array_fill(of_endpoint, ARRAY[cardinality(parked)])) p (message, endpoint)
        WHERE x.message = p.message AND x.endpoint = p.endpoint;
    END IF;
    IF e.rate_interval > 0 AND taken <> '{}' THEN
        UPDATE hapax.endpoint_state x
        SET rate_at = greatest(x.rate_at, at)
            + cardinality(taken) * e.rate_interval * interval '1 microsecond'
        WHERE x.endpoint = of_endpoint RETURNING hapax.rate_next_at(x.rate_at) INTO next_at;
    END IF;
    lowest_leased := least(lowest_leased, (SELECT min(t) FROM unnest(taken) t));
    -- This is not done with every claim, because each would write the row.
    IF lowest_leased < e.leased_from OR lowest_leased > e.leased_from + 1000 THEN
        UPDATE hapax.endpoint_state x SET leased_from = lowest_leased WHERE x.endpoint = of_endpoint;
    END IF;
    leased_until := at + e.lease * interval '1 microsecond';
    IF e.open_until IS NOT NULL AND taken <> '{}' THEN
        UPDATE hapax.endpoint_state x
        SET circuit = (hapax.judge_circuit(x, 0, leased_until, e.max_in_flight, at)).circuit,
            open_until = (hapax.judge_circuit(x, 0, leased_until, e.max_in_flight, at)).open_until
        WHERE x.endpoint = of_endpoint RETURNING x.circuit INTO e.circuit;
    END IF;
    WITH leased AS (
        UPDATE hapax.delivery x
        SET state = hapax.delivery_state('leased'), due_at = leased_until, circuit = e.circuit,
            fence = hapax.next_fence(x.fence), attempt = x.attempt + 1, started_at = at, node = of_node
        -- The endpoint is joined: as a constant, a plan made for an empty table would read all of its
        -- deliveries.
        FROM unnest(taken, array_fill(of_endpoint, ARRAY[cardinality(taken)]))
            WITH ORDINALITY t (message, endpoint, n)
        WHERE x.message = t.message AND x.endpoint = t.endpoint
        RETURNING t.n, x.fence, x.attempt)
    SELECT array_agg(l.fence ORDER BY l.n), array_agg(l.attempt ORDER BY l.n) INTO fences, attempts
    FROM leased l;
END $$;
