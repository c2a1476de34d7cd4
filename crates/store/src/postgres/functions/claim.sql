-- Keeps: attempt+1 and a new fence, committed before the work. Claims up to `wanted` due jobs of a
-- handler, over its lanes in turn from the one after after_lane. `guarded`: order is decided here,
-- and the resource is leased with the job; otherwise in the work's own transaction. The last row
-- has no job: it returns the events whose jobs the guard set aside, which lane came first, where
-- the next look at parked jobs begins, and how far this one has looked.
--
-- known_lanes (sorted) and known_since: in these lanes no due job was left before that time, as far
-- as the calling node knows, and no lease ended unseen before leases_since. While another
-- transaction stays open, rows that were claimed since it began cannot be vacuumed, and every claim
-- would scan all of them. These values are a hint: a slow commit or a locked row may lie before
-- them, so a node claims without them every second or so.
CREATE OR REPLACE FUNCTION hapax.claim(
    of_handler integer, wanted integer, who text, guarded boolean, after_lane integer,
    seen_lane integer, seen_resource text, known_lanes integer[], known_since timestamptz[],
    leases_since timestamptz, now_at timestamptz DEFAULT NULL)
RETURNS TABLE (
    job uuid, fence bigint, attempt integer, run integer, leased_until timestamptz, event uuid,
    lane integer, tenant text, event_id bytea, event_type bytea, occurred_at timestamptz,
    received_at timestamptz, resource text, place bigint, forced boolean, alone boolean,
    headers bytea, body bytea, body_hash uuid,
    set_aside uuid[], look_lane integer, look_resource text, lanes_seen integer[],
    seen_until timestamptz[], leases_until timestamptz)
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
-- A plan that was made while the tables were small must do for large ones too.
SET enable_seqscan = off
SET enable_bitmapscan = off
SET enable_hashjoin = off
SET enable_mergejoin = off
SET plan_cache_mode = force_generic_plan
AS $$
#variable_conflict use_column
DECLARE
    at CONSTANT timestamptz := coalesce(now_at, statement_timestamp());
    h hapax.handler;
    j hapax.job;
    lanes integer[] := '{}';
    current_lane integer := coalesce(after_lane, 0);
    first_due timestamptz;
    wrapped boolean := false;
    taken uuid[] := '{}';
    few uuid[];
    few_lost integer[];
    aside uuid[] := '{}';
    admitted integer;
    room integer;
    share integer;
    next_lane integer := seen_lane;
    next_resource text := seen_resource;
    by_itself boolean := false;
    -- A commit may take that long after its statement took the time.
    slack CONSTANT interval := '200 ms';
    ended integer := 0;
    next_known integer;
    since timestamptz;
    skipped timestamptz;
    latest timestamptz;
BEGIN
    lanes_seen := '{}';
    seen_until := '{}';
    SELECT * INTO h FROM hapax.handler WHERE handler = of_handler;
    IF NOT FOUND THEN
        RETURN;
    END IF;
    FOR j IN
        SELECT * FROM hapax.job x
        WHERE x.handler = of_handler AND x.state = 1 AND x.due_at <= at
          AND x.due_at >= coalesce(leases_since, '-infinity')
        ORDER BY x.due_at LIMIT 64
        FOR UPDATE SKIP LOCKED
    LOOP
        PERFORM hapax.lose(h, j, at);
        ended := ended + 1;
        leases_until := j.due_at;
    END LOOP;
    IF ended < 64 THEN
        leases_until := at - slack;
    END IF;
    IF ended > 0 THEN
        -- A lost job is due from the end of its lease on, which may be long ago.
        known_lanes := NULL;
    END IF;
    IF h.policy IS NOT NULL THEN
        -- A job that an earlier step missed must not stay parked at a free resource.
        FOR look IN 1..16 LOOP
            SELECT x.lane, x.resource INTO next_lane, next_resource FROM hapax.job x
            WHERE x.handler = of_handler AND x.state = 6
              AND (x.lane, x.resource) > (coalesce(next_lane, 0), coalesce(next_resource, ''))
            ORDER BY x.lane, x.resource, x.position, x.job LIMIT 1;
            EXIT WHEN NOT FOUND;
            PERFORM hapax.ready_next(h, next_lane, next_resource, at);
        END LOOP;
    END IF;

    IF h.policy > 0 THEN
        FOR j IN
            SELECT * FROM hapax.job x
            WHERE x.handler = of_handler AND x.state = 5 AND x.due_at <= at
            ORDER BY x.due_at LIMIT 64
            FOR UPDATE SKIP LOCKED
        LOOP
            -- A due job may fill the gap.
            PERFORM FROM hapax.job x
            WHERE x.handler = of_handler AND x.lane = j.lane AND x.state = 0 AND x.due_at <= at;
            CONTINUE WHEN FOUND;
            PERFORM FROM hapax.job x
            WHERE x.lane = j.lane AND x.resource = j.resource AND x.state = 1;
            CONTINUE WHEN FOUND;
            PERFORM hapax.end_hold(h, j, at);
            aside := aside || j.event;
        END LOOP;
    END IF;

    -- One probe per lane, however many jobs wait in it.
    FOR look IN 1..256 LOOP
        EXIT WHEN cardinality(lanes) >= least(wanted, 64);
        SELECT min(k) INTO next_known FROM unnest(known_lanes) k WHERE k > current_lane;
        SELECT x.lane, x.due_at INTO room, first_due FROM hapax.job x
        WHERE x.handler = of_handler AND x.state = 0 AND x.lane > current_lane
          AND x.lane < coalesce(next_known, 2147483647)
        ORDER BY x.lane, x.due_at, x.job LIMIT 1;
        IF NOT FOUND AND next_known IS NOT NULL THEN
            room := next_known;
            SELECT x.due_at INTO first_due FROM hapax.job x
            WHERE x.handler = of_handler AND x.state = 0 AND x.lane = next_known
              AND x.due_at >= known_since[array_position(known_lanes, next_known)]
            ORDER BY x.due_at, x.job LIMIT 1;
        ELSIF NOT FOUND THEN
            EXIT WHEN wrapped OR after_lane IS NULL;
            wrapped := true;
            current_lane := 0;
            CONTINUE;
        END IF;
        EXIT WHEN wrapped AND room > after_lane;
        current_lane := room;
        IF first_due <= at THEN
            lanes := lanes || current_lane;
        END IF;
    END LOOP;

    -- First each lane's share, then the rest for lanes with more jobs.
    share := ceil(wanted::numeric / greatest(cardinality(lanes), 1));
    <<rounds>>
    FOR round IN 1..2 LOOP
        FOREACH current_lane IN ARRAY lanes LOOP
            room := wanted - cardinality(taken);
            EXIT rounds WHEN room <= 0;
            IF round = 1 THEN
                room := least(room, share);
            END IF;
            since := coalesce(
                known_since[array_position(known_lanes, current_lane)], '-infinity');
            skipped := NULL;
            latest := NULL;
            IF guarded AND h.policy IS NOT NULL THEN
                FOR j IN
                    SELECT * FROM hapax.job x
                    WHERE x.handler = of_handler AND x.lane = current_lane AND x.state = 0
                      AND x.due_at <= at AND x.due_at >= since
                    ORDER BY x.due_at, x.job LIMIT room
                    FOR UPDATE SKIP LOCKED
                LOOP
                    IF j.lost > 0 AND h.workplace = 0 AND cardinality(taken) > 0 THEN
                        skipped := coalesce(skipped, j.due_at);
                        CONTINUE;
                    END IF;
                    latest := j.due_at;
                    IF j.resource IS NOT NULL THEN
                        admitted := hapax.admit(h, j, at);
                        IF admitted = 2 THEN
                            aside := aside || j.event;
                        END IF;
                        CONTINUE WHEN admitted <> 0;
                    END IF;
                    UPDATE hapax.job x SET state = 1, due_at = at + h.lease * interval '1 microsecond',
                        fence = hapax.next_fence(x.fence), attempt = x.attempt + 1,
                        started_at = at, worker = who, exclusive = x.resource IS NOT NULL
                    WHERE x.job = j.job;
                    taken := taken || j.job;
                    by_itself := j.lost > 0 AND h.workplace = 0;
                    EXIT rounds WHEN by_itself;
                END LOOP;
                IF coalesce(skipped, latest) IS NOT NULL THEN
                    lanes_seen := lanes_seen || current_lane;
                    seen_until := seen_until || (coalesce(skipped, latest) - slack);
                END IF;
                CONTINUE;
            END IF;
            SELECT array_agg(c.job), array_agg(c.lost), max(c.due_at),
                min(c.due_at) FILTER (WHERE c.lost > 0)
            INTO few, few_lost, latest, skipped FROM (
                SELECT x.job, CASE h.workplace WHEN 0 THEN x.lost ELSE 0 END AS lost, x.due_at
                FROM hapax.job x
                WHERE x.handler = of_handler AND x.lane = current_lane AND x.state = 0
                  AND x.due_at <= at AND x.due_at >= since
                ORDER BY x.due_at, x.job LIMIT room
                FOR UPDATE SKIP LOCKED) c;
            CONTINUE WHEN few IS NULL;
            by_itself := cardinality(taken) = 0 AND few_lost[1] > 0;
            IF by_itself THEN
                few := few[1:1];
            ELSE
                lanes_seen := lanes_seen || current_lane;
                seen_until := seen_until || (coalesce(skipped, latest) - slack);
            END IF;
            WITH leased AS (
                UPDATE hapax.job x SET state = 1, due_at = at + h.lease * interval '1 microsecond',
                    fence = hapax.next_fence(x.fence), attempt = x.attempt + 1,
                    started_at = at, worker = who, exclusive = false
                WHERE x.job = ANY (few) AND (by_itself OR x.lost = 0 OR h.workplace <> 0)
                RETURNING x.job)
            SELECT taken || coalesce(array_agg(l.job ORDER BY array_position(few, l.job)), '{}')
            INTO taken FROM leased l;
            EXIT rounds WHEN by_itself;
        END LOOP;
    END LOOP;

    IF h.policy IS NOT NULL AND NOT guarded AND cardinality(taken) > 0 THEN
        -- The work's own transaction will lock the mark: it must be there.
        PERFORM hapax.try_mark(r.lane, r.resource)
        FROM (SELECT DISTINCT x.lane, x.resource FROM hapax.job x
              WHERE x.job = ANY (taken) AND x.resource IS NOT NULL) r;
        IF h.policy = 1 AND h.start_at IS NULL THEN
            PERFORM hapax.begin_sequence(h, x.lane, x.resource, x.position)
            FROM unnest(taken) WITH ORDINALITY t (job, n) JOIN hapax.job x ON x.job = t.job
            WHERE x.resource IS NOT NULL ORDER BY t.n;
        END IF;
    END IF;

    RETURN QUERY
    SELECT x.job, x.fence, x.attempt, x.run, x.due_at, x.event, x.lane, e.tenant, e.event_id,
        e.event_type, e.occurred_at, e.received_at, x.resource, x.position, x.forced,
        x.lost > 0 AND h.workplace = 0,
        b.headers, b.body, e.body_hash, NULL::uuid[], NULL::integer, NULL::text,
        NULL::integer[], NULL::timestamptz[], NULL::timestamptz
    FROM unnest(taken) WITH ORDINALITY t (job, n)
    JOIN hapax.job x ON x.job = t.job
    JOIN hapax.event e ON e.id = x.event
    JOIN hapax.body b ON b.id = x.event
    ORDER BY t.n;
    job := NULL;
    lane := coalesce(lanes[1], current_lane);
    set_aside := aside;
    look_lane := next_lane;
    look_resource := next_resource;
    RETURN NEXT;
END $$;
