-- Keeps: attempts are settled under their fences, and new ones are counted before their requests, in one
-- commit. Outcomes are recorded first, sorted by delivery, so that a report at the end of a lease
-- still counts. Then expired leases are ended. Then up to `wanted` deliveries are claimed, over the
-- endpoints in turn from the one after after_endpoint. The arrays describe outcomes: see
-- hapax.settle_attempt and, for signals and pauses, hapax.note_answer. vault_keys: the keys that
-- this node holds. The last row has no delivery: it returns which outcomes were recorded, when
-- something is next due, where the next turn begins, and up to which times this call has read.
--
-- fast_ms: an endpoint may get claims ahead if all its attempts in this call took less than this. NULL:
-- no endpoint may. known_endpoints (sorted), known_since and leases_since: as the lanes of hapax.claim.
-- Claimed deliveries leave dead entries in the indexes, and without a hint every call would pass all of
-- them.
CREATE OR REPLACE FUNCTION hapax.exchange(
    messages bigint[], endpoints integer[], fences bigint[], verdicts integer[], tooks bigint[],
    statuses integer[], answers text[], errors text[], hows integer[], waits bigint[],
    dices double precision[], signals integer[], pauses bigint[], wanted integer, bytes_max bigint, of_node text, vault_keys bigint[],
    after_endpoint integer, known_endpoints integer[], known_since timestamptz[],
    leases_since timestamptz, now_at timestamptz DEFAULT NULL, fast_ms bigint DEFAULT NULL)
RETURNS TABLE (
    delivery uuid, fence bigint, attempt integer, leased_until timestamptz, message text, body bytea,
    endpoint uuid, tenant text, settings text, secrets bytea, headers bytea,
    settled boolean[], next_due timestamptz, next_turn integer,
    endpoints_seen integer[], seen_until timestamptz[], leases_until timestamptz)
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
-- A plan that was made while the tables were small must work for large ones too. The functions that
-- this one calls make their plans under the same settings.
SET enable_seqscan = off
SET enable_bitmapscan = off
SET enable_hashjoin = off
SET enable_mergejoin = off
-- The index on due deliveries has their order. A plan with a sort would read every delivery that waits for an
-- endpoint.
SET enable_sort = off
SET plan_cache_mode = force_generic_plan
AS $$
#variable_conflict use_column
DECLARE
    at CONSTANT timestamptz := coalesce(now_at, statement_timestamp());
    recorded boolean[] := array_fill(false, ARRAY[cardinality(messages)]);
    o record;
    settlement record;
    leases record;
    n bigint;
    key_endpoints integer[] := '{}';
    keys text[] := '{}';
    said bigint[] := '{}';
    said_of bigint[] := '{}';
    died boolean[] := '{}';
    due record;
    got record;
    current_endpoint integer;
    with_more integer[] := '{}';
    room integer;
    share integer;
    bytes_left bigint := bytes_max;
    fast_endpoints integer[] := '{}';
    taken_messages bigint[] := '{}';
    taken_endpoints integer[] := '{}';
    taken_fences bigint[] := '{}';
    taken_attempts integer[] := '{}';
    taken_until timestamptz[] := '{}';
    soonest timestamptz;
    turn integer := after_endpoint;
BEGIN
    endpoints_seen := '{}';
    seen_until := '{}';
    -- Most outcomes are the only report of an attempt that delivered. One statement records all of these, and
    -- locks deliveries in the order that every call uses.
    WITH ended AS (
        UPDATE hapax.delivery x
        SET state = hapax.delivery_state('delivered'), due_at = at, error = NULL, took_ms = r.took,
            answer_status = r.status, answer = r.answer
        FROM (
            SELECT u.*, count(*) OVER (PARTITION BY u.message, u.endpoint) AS reports
            FROM unnest(messages, endpoints, fences, verdicts, tooks, statuses, answers)
                WITH ORDINALITY u (message, endpoint, fence, verdict, took, status, answer, n)
            ORDER BY u.message, u.endpoint) r
        -- If there are two reports about one delivery, the first one counts, whatever it says.
        WHERE r.verdict = 0 AND r.reports = 1 AND x.message = r.message AND x.endpoint = r.endpoint
          -- The state is in an expression: otherwise the planner could read the index of all leases for each
          -- outcome.
          AND x.fence = r.fence AND x.state + 0 = hapax.delivery_state('leased')
        RETURNING r.n, x.endpoint, x.key, x.circuit)
    SELECT coalesce(array_agg(e.n), '{}'), coalesce(array_agg(e.circuit), '{}'),
        coalesce(array_agg(e.endpoint) FILTER (WHERE e.key IS NOT NULL), '{}'),
        coalesce(array_agg(e.key) FILTER (WHERE e.key IS NOT NULL), '{}')
    INTO said_of, said, key_endpoints, keys FROM ended e;
    died := array_fill(false, ARRAY[cardinality(said_of)]);
    FOREACH n IN ARRAY said_of LOOP
        recorded[n] := true;
    END LOOP;
    FOR o IN
        SELECT * FROM unnest(messages, endpoints, fences, verdicts, tooks, statuses, answers, errors,
                             hows, waits, dices, signals, pauses) WITH ORDINALITY
            r (message, endpoint, fence, verdict, took, status, answer, error, how, wait, dice, signal,
               pause, n)
        WHERE NOT recorded[r.n]
        ORDER BY r.message, r.endpoint, r.n
    LOOP
        settlement := hapax.settle_attempt(
            o.message, o.endpoint, o.fence, o.verdict, o.took, o.status, o.answer, o.error, o.how,
            o.wait, o.dice, at);
        recorded[o.n] := settlement.is_recorded;
        said := said || settlement.of_circuit;
        said_of := said_of || o.n;
        died := died || settlement.is_dead;
        IF settlement.of_key IS NOT NULL THEN
            key_endpoints := key_endpoints || o.endpoint;
            keys := keys || settlement.of_key;
        END IF;
    END LOOP;
    IF keys <> '{}' THEN
        PERFORM hapax.ready_next_delivery(k.endpoint, k.key, at)
        FROM (SELECT DISTINCT x.endpoint, x.key FROM unnest(key_endpoints, keys) x (endpoint, key)
              ORDER BY x.endpoint, x.key) k;
    END IF;
    -- The effect of the outcomes on the circuits of their endpoints. A healthy endpoint that took
    -- its deliveries needs no lock.
    FOR o IN
        WITH answers AS (
            SELECT a.circuit, a.n, endpoints[a.n] AS endpoint, signals[a.n] AS signal,
                pauses[a.n] AS pause, errors[a.n] AS error, a.is_dead
            FROM unnest(said, said_of, died) a (circuit, n, is_dead) WHERE a.circuit IS NOT NULL)
        SELECT a.* FROM answers a
        WHERE a.endpoint IN (
            SELECT s.endpoint FROM hapax.endpoint_state s
            WHERE s.endpoint = ANY (ARRAY(SELECT DISTINCT b.endpoint FROM answers b))
              AND (s.failures > 0 OR s.open_until IS NOT NULL OR s.slots IS NOT NULL
                   OR EXISTS (SELECT FROM answers b WHERE b.endpoint = s.endpoint
                              AND (b.signal IN (1, 2, 3) OR b.is_dead))))
        ORDER BY a.endpoint, a.n
    LOOP
        IF o.is_dead THEN
            PERFORM hapax.note_death(o.endpoint, at);
        END IF;
        PERFORM hapax.note_answer(o.endpoint, o.circuit, o.signal, o.pause, o.error, at);
    END LOOP;
    leases := hapax.end_delivery_leases(leases_since, at);
    leases_until := leases.ended_until;
    IF leases.ended > 0 THEN
        -- The due time of a lost delivery may be long ago.
        known_endpoints := NULL;
    END IF;
    IF leases.has_more THEN
        soonest := at;
    END IF;

    IF wanted > 0 THEN
        IF fast_ms IS NOT NULL THEN
            SELECT coalesce(array_agg(f.endpoint), '{}') INTO fast_endpoints FROM (
                SELECT u.endpoint FROM unnest(endpoints, verdicts, tooks) u (endpoint, verdict, took)
                GROUP BY u.endpoint HAVING bool_and(u.verdict = 0 AND u.took < fast_ms)) f;
        END IF;
        due := hapax.due_endpoints(least(wanted, 256), after_endpoint, vault_keys, known_endpoints, known_since,
                                   at);
        soonest := least(soonest, due.next_due, CASE WHEN NOT due.is_all THEN at END);
        IF due.endpoints = '{}' THEN
            turn := due.last_endpoint;
        END IF;
        -- The first round gives each endpoint its share, the second gives the rest to endpoints with more
        -- deliveries.
        share := ceil(wanted::numeric / greatest(cardinality(due.endpoints), 1));
        <<rounds>>
        FOR round IN 1..2 LOOP
            FOREACH current_endpoint IN ARRAY CASE round WHEN 1 THEN due.endpoints ELSE with_more END LOOP
                room := wanted - cardinality(taken_messages);
                EXIT rounds WHEN room <= 0;
                IF round = 1 THEN
                    room := least(room, share);
                    turn := current_endpoint;
                END IF;
                got := hapax.take_deliveries(
                    current_endpoint, room, bytes_left, taken_messages = '{}',
                    coalesce(known_since[array_position(known_endpoints, current_endpoint)],
                             '-infinity'),
                    of_node, vault_keys, at, current_endpoint = ANY (fast_endpoints));
                taken_messages := taken_messages || got.taken;
                taken_endpoints := taken_endpoints
                    || array_fill(current_endpoint, ARRAY[cardinality(got.taken)]);
                taken_fences := taken_fences || got.fences;
                taken_attempts := taken_attempts || got.attempts;
                taken_until := taken_until
                    || array_fill(got.leased_until, ARRAY[cardinality(got.taken)]);
                bytes_left := bytes_left - got.bytes;
                soonest := least(soonest, got.next_at, CASE WHEN got.is_busy THEN at END);
                IF round = 1 AND got.is_busy THEN
                    with_more := with_more || current_endpoint;
                END IF;
                IF got.seen_until IS NOT NULL THEN
                    endpoints_seen := endpoints_seen || current_endpoint;
                    seen_until := seen_until || (got.seen_until - hapax.commit_slack());
                END IF;
                EXIT rounds WHEN got.is_full;
            END LOOP;
        END LOOP;
    END IF;
    IF taken_messages = '{}' THEN
        -- A node that has claims asks again soon, and then ends the leases that ran out.
        soonest := least(soonest, (
            SELECT d.due_at FROM hapax.delivery d
            WHERE d.state = hapax.delivery_state('leased')
              AND d.due_at >= coalesce(leases_until, '-infinity')
            ORDER BY d.due_at LIMIT 1));
    END IF;

    RETURN QUERY
    SELECT hapax.delivery_id(m.created_at, m.fingerprint, t.message, t.endpoint), t.fence, t.attempt,
        t.leased_until, m.id, coalesce(CASE WHEN e.is_thin THEN m.thin END, m.body), e.id, e.tenant,
        e.settings, e.secrets, e.headers, NULL::boolean[], NULL::timestamptz, NULL::integer,
        NULL::integer[], NULL::timestamptz[], NULL::timestamptz
    FROM unnest(taken_messages, taken_endpoints, taken_fences, taken_attempts, taken_until)
        WITH ORDINALITY t (message, endpoint, fence, attempt, leased_until, n)
    JOIN hapax.message m ON m.message = t.message
    JOIN hapax.endpoint e ON e.endpoint = t.endpoint
    ORDER BY t.n;
    delivery := NULL;
    settled := recorded;
    next_due := soonest;
    next_turn := turn;
    RETURN NEXT;
END $$;
