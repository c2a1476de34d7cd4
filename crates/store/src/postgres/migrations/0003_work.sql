-- The life of jobs: claimed by state, settled under the fence, kept in order under the lock of a
-- mark. Each function that a node calls is one statement, and so one commit.
--
-- Locks: a job's row first, then the mark of its resource. A transaction that goes on to ready
-- other jobs skips the locked ones, and a claim skips every locked row. A claim never waits for a
-- lock, so a transaction that stays open delays only the rows that it has locked. A later claim
-- finds the skipped rows.
--
-- Time: now_at is for tests; without it the clock is this database's.

-- Keeps: the rules of hapax_core::order, for statements that decide under a lock. 0 run, 1 stale, 2
-- hold.
CREATE FUNCTION hapax.guard(h hapax.handler, mark bigint, place bigint) RETURNS smallint
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    verdict smallint;
BEGIN
    IF h.policy IS NULL THEN
        RETURN 0;
    ELSIF h.policy = 0 THEN
        RETURN CASE WHEN place < mark THEN 1 ELSE 0 END;
    ELSIF h.policy = 1 THEN
        RETURN CASE
            WHEN mark IS NOT NULL THEN CASE
                WHEN place <= mark THEN 1
                WHEN place - 1 = mark THEN 0
                ELSE 2 END
            WHEN h.start_at IS NULL OR place = h.start_at THEN 0
            WHEN place < h.start_at THEN 1
            ELSE 2 END;
    END IF;
    SELECT t.says INTO verdict FROM hapax.transition t
    WHERE t.handler = h.handler AND t.from_at = coalesce(mark, -1) AND t.to_at = place;
    IF FOUND THEN
        RETURN verdict;
    END IF;
    -- A mark that is no state of today's machine counts as none.
    PERFORM FROM hapax.transition t
    WHERE t.handler = h.handler AND t.from_at = mark AND t.to_at = mark;
    IF NOT FOUND THEN
        SELECT t.says INTO verdict FROM hapax.transition t
        WHERE t.handler = h.handler AND t.from_at = -1 AND t.to_at = place;
    END IF;
    RETURN coalesce(verdict, 1);
END $$;

-- Keeps: a right that was not given out cannot be guessed, and a later fence is the larger one. Job
-- ids follow from event ids, so otherwise a role that may only call hapax.complete could end the
-- work of another. A gap is random, up to 2^40 at first and always a small part of what is left
-- below 2^53, the largest number that JSON clients read exactly. 48 bits of gen_random_uuid(),
-- because random() is predictable.
CREATE FUNCTION hapax.next_fence(after bigint) RETURNS bigint
LANGUAGE sql VOLATILE AS $$
    SELECT after + 1 + ('x' || pg_catalog.translate(
            pg_catalog.substr(pg_catalog.gen_random_uuid()::text, 1, 13), '-', ''))::bit(48)::bigint
        % ((9007199254740991 - after) / 8192 + 1);
$$;

-- Records how an attempt ended. A later record of the same attempt replaces the earlier one.
CREATE FUNCTION hapax.note_attempt(
    j hapax.job, outcome text, ended_at timestamptz, error text,
    answer_status integer DEFAULT NULL, answer text DEFAULT NULL)
RETURNS void
LANGUAGE sql SET search_path = pg_catalog, pg_temp AS $$
    INSERT INTO hapax.attempt (job, run, attempt, started_at, ended_at, outcome, error, worker,
                               answer_status, answer)
    VALUES (j.job, j.run, j.attempt, coalesce(j.started_at, ended_at, j.due_at), ended_at, outcome,
            error, coalesce(j.worker, ''), answer_status, answer)
    ON CONFLICT (job, run, attempt) DO UPDATE
    SET ended_at = excluded.ended_at, outcome = excluded.outcome, error = excluded.error,
        answer_status = excluded.answer_status, answer = excluded.answer;
$$;

-- Called when a job of this resource is no longer leased, or was set aside. Readies the jobs that
-- the mark now admits, and the first parked one if none is leased. They are decided again when
-- claimed. Returns true if any job is ready now, or held past its deadline, so that the next claim
-- has something to do.
CREATE FUNCTION hapax.ready_next(h hapax.handler, of_lane integer, of_resource text, at timestamptz)
RETURNS boolean
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    mark bigint;
    any_held boolean := false;
BEGIN
    IF h.policy IS NULL OR h.policy <> 0 THEN
        SELECT m.position INTO mark FROM hapax.mark m
        WHERE m.lane = of_lane AND m.resource = of_resource;
        UPDATE hapax.job SET state = 0, due_at = at
        WHERE job IN (
            SELECT w.job FROM hapax.job w
            WHERE w.lane = of_lane AND w.resource = of_resource AND w.state = 5
              AND (h.policy IS NULL OR h.policy <> 1 OR w.position - 1 <= mark)
              AND (h.policy IS NULL OR hapax.guard(h, mark, w.position) <> 2)
            FOR UPDATE SKIP LOCKED);
        any_held := FOUND;
        IF NOT any_held THEN
            PERFORM FROM hapax.job w
            WHERE w.lane = of_lane AND w.resource = of_resource AND w.state = 5 AND w.due_at <= at;
            any_held := FOUND;
        END IF;
    END IF;
    PERFORM FROM hapax.job b WHERE b.lane = of_lane AND b.resource = of_resource AND b.state = 1;
    IF FOUND THEN
        RETURN any_held;
    END IF;
    UPDATE hapax.job SET state = 0, due_at = at
    WHERE job = (
        SELECT w.job FROM hapax.job w
        WHERE w.handler = h.handler AND w.lane = of_lane AND w.resource = of_resource
          AND w.state = 6
        ORDER BY w.position, w.job LIMIT 1
        FOR UPDATE SKIP LOCKED);
    RETURN FOUND OR any_held;
END $$;

-- Ends a lease that ran out, of a job whose row is locked: an attempt without a verdict. Its fence
-- stays: until the job is claimed again, a worker that was only slow may still report "done".
CREATE FUNCTION hapax.lose(h hapax.handler, j hapax.job, at timestamptz) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    PERFORM hapax.note_attempt(j, 'lost', NULL, 'the lease ran out');
    IF j.lost >= 5 AND h.workplace = 0 THEN
        UPDATE hapax.job SET state = 4, due_at = at, lost = j.lost + 1, exclusive = false,
            error = 'every attempt was lost: the process died or the lease ran out each time'
        WHERE job = j.job;
    ELSE
        UPDATE hapax.job SET state = 0, lost = j.lost + 1, exclusive = false,
            -- ±20 %, so that jobs that were lost together are not due together.
            due_at = least(j.due_at, at)
                + least(2 ^ least(j.lost, 16), 300) * (0.8 + 0.4 * random()) * interval '1 second',
            error = 'the lease ran out'
        WHERE job = j.job;
    END IF;
    IF j.resource IS NOT NULL THEN
        PERFORM hapax.ready_next(h, j.lane, j.resource, at);
    END IF;
END $$;

-- Sends a held job, whose row is locked, to review.
CREATE FUNCTION hapax.to_review(of_job uuid, why text, at timestamptz) RETURNS void
LANGUAGE sql SET search_path = pg_catalog, pg_temp AS $$
    UPDATE hapax.job SET state = 7, due_at = at, error = why WHERE job = of_job;
$$;

-- Holds this job, whose row is locked, within bounds: a position before it was not applied.
CREATE FUNCTION hapax.hold(h hapax.handler, j hapax.job, at timestamptz) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    waiting integer;
    newest uuid := j.job;
    last hapax.job;
BEGIN
    SELECT count(*) INTO waiting FROM (
        SELECT FROM hapax.job w
        WHERE w.lane = j.lane AND w.resource = j.resource AND w.state = 5
        LIMIT h.hold_max) w;
    UPDATE hapax.job SET state = 5, due_at = at + h.hold * interval '1 microsecond', exclusive = false
    WHERE job = j.job;
    IF waiting < h.hold_max THEN
        RETURN;
    END IF;
    -- The numbers of a machine's states do not order them by age.
    IF h.policy = 1 THEN
        SELECT w.* INTO last FROM hapax.job w
        WHERE w.lane = j.lane AND w.resource = j.resource AND w.state = 5
        ORDER BY w.position DESC, w.job DESC LIMIT 1
        FOR UPDATE SKIP LOCKED;
        newest := coalesce(last.job, newest);
    END IF;
    PERFORM hapax.to_review(newest, 'too many jobs of its resource wait for their predecessors', at);
END $$;

-- Ends the hold of this job, whose row is locked, when a gap stayed open past its deadline: the
-- handler's rule decides. Going on is one step of the mark; positions at or below it are stale from
-- then on.
CREATE FUNCTION hapax.end_hold(h hapax.handler, j hapax.job, at timestamptz) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    lowest bigint;
BEGIN
    IF NOT h.go THEN
        PERFORM hapax.to_review(j.job, 'its predecessor did not arrive in time', at);
        RETURN;
    ELSIF h.policy <> 1 THEN
        -- The state that leads to most of the others goes first, as if a person had forced it.
        UPDATE hapax.job SET state = 0, due_at = at, forced = true
        WHERE job = (
            SELECT w.job FROM hapax.job w
            WHERE w.lane = j.lane AND w.resource = j.resource AND w.state = 5
            ORDER BY (SELECT count(*) FROM hapax.job o JOIN hapax.transition t
                          ON t.handler = h.handler AND t.from_at = w.position
                             AND t.to_at = o.position AND t.says <> 1
                      WHERE o.lane = j.lane AND o.resource = j.resource AND o.state = 5) DESC,
                w.job
            LIMIT 1
            FOR UPDATE SKIP LOCKED);
        RETURN;
    END IF;
    IF NOT hapax.try_mark(j.lane, j.resource) THEN
        RETURN;
    END IF;
    SELECT w.position INTO lowest FROM hapax.job w
    WHERE w.lane = j.lane AND w.resource = j.resource AND w.state = 5
    ORDER BY w.position LIMIT 1;
    UPDATE hapax.mark m SET position = greatest(m.position, lowest - 1)
    WHERE m.lane = j.lane AND m.resource = j.resource;
    PERFORM hapax.ready_next(h, j.lane, j.resource, at);
END $$;

-- Locks the row of a mark without waiting: false if another transaction holds it. A missing row is
-- inserted; the advisory lock keeps two inserting transactions from waiting for each other.
CREATE FUNCTION hapax.try_mark(of_lane integer, of_resource text) RETURNS boolean
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    PERFORM FROM hapax.mark m WHERE m.lane = of_lane AND m.resource = of_resource
    FOR UPDATE SKIP LOCKED;
    IF FOUND THEN
        RETURN true;
    END IF;
    -- Looked for first: inserting beside a row that is being changed would wait for its end.
    PERFORM FROM hapax.mark m WHERE m.lane = of_lane AND m.resource = of_resource;
    IF FOUND OR NOT pg_try_advisory_xact_lock(hashtextextended(of_resource, of_lane)) THEN
        RETURN false;
    END IF;
    INSERT INTO hapax.mark (lane, resource) VALUES (of_lane, of_resource) ON CONFLICT DO NOTHING;
    RETURN FOUND;
END $$;

-- Keeps: order, and one job at a time per resource. Decides about a due job whose row is locked: 0
-- if it may be leased now; otherwise it is parked (1), or stale or held (2), when this returns. For
-- 0 the mark's row is locked until the lease is committed, so no other transaction leases the
-- resource meanwhile.
CREATE FUNCTION hapax.admit(h hapax.handler, j hapax.job, at timestamptz) RETURNS integer
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    mark bigint;
    verdict smallint := 0;
    busy boolean := true;
BEGIN
    IF hapax.try_mark(j.lane, j.resource) THEN
        SELECT m.position INTO mark FROM hapax.mark m
        WHERE m.lane = j.lane AND m.resource = j.resource;
        IF NOT j.forced THEN
            verdict := hapax.guard(h, mark, j.position);
        END IF;
        PERFORM FROM hapax.job b
        WHERE b.lane = j.lane AND b.resource = j.resource AND b.state = 1;
        busy := FOUND;
    END IF;
    IF verdict = 1 THEN
        UPDATE hapax.job SET state = 3, due_at = at WHERE job = j.job;
    ELSIF verdict = 2 THEN
        PERFORM hapax.hold(h, j, at);
    ELSIF busy THEN
        UPDATE hapax.job SET state = 6, due_at = at WHERE job = j.job;
        RETURN 1;
    ELSE
        PERFORM hapax.begin_sequence(h, j.lane, j.resource, j.position);
        RETURN 0;
    END IF;
    -- It may have been readied to take its turn: the turn passes to the next.
    PERFORM hapax.ready_next(h, j.lane, j.resource, at);
    RETURN 2;
END $$;

-- Keeps: a sequence without a first number begins with the number that is claimed first. It is
-- committed with the claim: if this number fails, no other is taken for the first.
CREATE FUNCTION hapax.begin_sequence(h hapax.handler, of_lane integer, of_resource text, first bigint)
RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    IF h.policy = 1 AND h.start_at IS NULL AND first > -9223372036854775808 THEN
        UPDATE hapax.mark m SET position = first - 1
        WHERE m.lane = of_lane AND m.resource = of_resource AND m.position IS NULL;
    END IF;
END $$;

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
CREATE FUNCTION hapax.claim(
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

-- Extends a lease. If the row is locked, the job is being settled: the lease counts as kept.
CREATE FUNCTION hapax.renew(of_job uuid, of_fence bigint, lease bigint, now_at timestamptz DEFAULT NULL)
RETURNS boolean
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    UPDATE hapax.job SET due_at = greatest(
        due_at, coalesce(now_at, statement_timestamp()) + lease * interval '1 microsecond')
    WHERE job = (
        SELECT x.job FROM hapax.job x
        WHERE x.job = of_job AND x.fence = of_fence AND x.state = 1
        FOR UPDATE SKIP LOCKED);
    IF NOT FOUND THEN
        PERFORM FROM hapax.job x WHERE x.job = of_job AND x.fence = of_fence AND x.state = 1;
    END IF;
    RETURN FOUND;
END $$;

-- Records a message with the commit that publishes it. The same id twice is one message. Publishers
-- under the same key wait for each other, so that the order of commits is that of the numbers.
-- hapax.unlinked: from which number on this transaction has messages of no event.
CREATE FUNCTION hapax.write_message(
    of_tenant text, of_id text, of_type text, of_data jsonb, of_key text, of_version text,
    of_event uuid, at timestamptz)
RETURNS text
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    written bigint;
    first CONSTANT text := current_setting('hapax.unlinked', true);
BEGIN
    IF of_key IS NOT NULL THEN
        PERFORM pg_advisory_xact_lock(hashtextextended(of_key, hashtextextended(of_tenant, 0)));
    END IF;
    INSERT INTO hapax.message (tenant, id, type, data, key, api_version, event, created_at)
    VALUES (of_tenant, of_id, of_type, of_data, of_key, of_version, of_event, at)
    ON CONFLICT (tenant, id) DO NOTHING
    RETURNING message INTO written;
    IF of_event IS NULL AND written IS NOT NULL AND (
        CASE WHEN first ~ '^[0-9]{1,18}$' THEN first::bigint > written ELSE true END)
    THEN
        PERFORM set_config('hapax.unlinked', written::text, true);
    END IF;
    RETURN of_id;
END $$;

-- The seal that records which job a transaction works for. It is made under a key that only this
-- schema's owner can read, and covers the transaction: a value that a session sets by hand, or
-- leaves behind, is ignored.
CREATE FUNCTION hapax.seal_of(of_job uuid) RETURNS text
LANGUAGE sql SET search_path = pg_catalog, pg_temp AS $$
    SELECT encode(sha256(
        e.cache_key || uuid_send(of_job) || convert_to(pg_current_xact_id()::text, 'UTF8')), 'hex')
    FROM hapax.epoch e;
$$;

-- From here to its end, messages that this transaction publishes are listed with this job's event.
CREATE FUNCTION hapax.works_for(of_job uuid) RETURNS void
LANGUAGE sql SET search_path = pg_catalog, pg_temp AS $$
    SELECT set_config('hapax.job', of_job || ' ' || hapax.seal_of(of_job), true);
$$;

-- The event that this transaction works for; null if works_for was not called.
CREATE FUNCTION hapax.worked_for() RETURNS uuid
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    said CONSTANT text := current_setting('hapax.job', true);
    of_event uuid;
BEGIN
    IF said ~ '^[0-9a-f-]{36} [0-9a-f]{64}$' AND substr(said, 38) = hapax.seal_of(left(said, 36)::uuid)
    THEN
        SELECT j.event INTO of_event FROM hapax.job j WHERE j.job = left(said, 36)::uuid;
    END IF;
    RETURN of_event;
END $$;

-- Keeps: messages that this transaction published before it completed a job are listed with the
-- job's event. hapax.unlinked, where the search begins, is a hint; written_in decides.
CREATE FUNCTION hapax.adopt(of_job uuid) RETURNS void
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
AS $$
DECLARE
    first CONSTANT text := current_setting('hapax.unlinked', true);
BEGIN
    IF first ~ '^[0-9]{1,18}$' THEN
        UPDATE hapax.message m SET event = j.event
        FROM hapax.job j
        WHERE j.job = of_job AND m.message >= first::bigint AND m.event IS NULL
          AND m.written_in = pg_current_xact_id();
        PERFORM set_config('hapax.unlinked', '', true);
    END IF;
    PERFORM hapax.works_for(of_job);
END $$;

-- Keeps: "done" once per fence, with the mark. A fence is good until the next claim, replay or
-- rejection, also after its lease; but not once the mark has passed the job: then another of its
-- resource was applied in its place. 0 the fence is lost, 1 done now, 2 done before under this fence,
-- 3 done now and others of its resource are ready.
CREATE FUNCTION hapax.done(
    of_job uuid, of_fence bigint, of_result text, at timestamptz,
    of_status integer DEFAULT NULL, of_answer text DEFAULT NULL)
RETURNS integer
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    h hapax.handler;
    j hapax.job;
    mark bigint;
    verdict smallint;
    overtaken CONSTANT text := 'a newer version of its resource was applied meanwhile';
BEGIN
    SELECT * INTO j FROM hapax.job x WHERE x.job = of_job FOR UPDATE;
    IF NOT FOUND OR j.fence IS DISTINCT FROM of_fence OR j.started_at IS NULL THEN
        RETURN 0;
    ELSIF j.state = 2 THEN
        IF of_status IS NOT NULL AND j.answer_status IS NULL THEN
            -- The app had completed the job by itself before it answered.
            UPDATE hapax.job SET answer_status = of_status, answer = of_answer WHERE job = of_job;
        END IF;
        RETURN 2;
    ELSIF j.state IN (3, 8) THEN
        RETURN 0;
    END IF;
    SELECT * INTO h FROM hapax.handler x WHERE x.handler = j.handler;
    IF j.resource IS NOT NULL THEN
        LOOP
            SELECT m.position INTO mark FROM hapax.mark m
            WHERE m.lane = j.lane AND m.resource = j.resource
            FOR UPDATE;
            EXIT WHEN FOUND;
            -- The row never existed, or retention has just deleted it.
            INSERT INTO hapax.mark (lane, resource) VALUES (j.lane, j.resource)
            ON CONFLICT DO NOTHING;
        END LOOP;
        IF h.policy IS NOT NULL AND mark IS NOT NULL AND NOT j.forced THEN
            verdict := hapax.guard(h, mark, j.position);
            IF verdict = 1 OR (h.policy = 2 AND verdict <> 0) THEN
                IF verdict = 1 AND j.state = 1 THEN
                    -- It can only be stale from now on: its resource need not wait for the end of
                    -- the lease. In a transaction of effects this is rolled back with them, and the
                    -- next claim records it.
                    PERFORM hapax.note_attempt(j, 'lost', at, overtaken);
                    UPDATE hapax.job SET state = 3, due_at = at, exclusive = false, error = overtaken
                    WHERE job = of_job;
                    PERFORM hapax.ready_next(h, j.lane, j.resource, at);
                END IF;
                RETURN 0;
            END IF;
        END IF;
        UPDATE hapax.mark m
        SET position = CASE WHEN h.policy = 2 THEN j.position ELSE greatest(mark, j.position) END,
            moved_at = greatest(m.moved_at, date_bin('1 hour', at, timestamptz 'epoch'))
        WHERE m.lane = j.lane AND m.resource = j.resource;
    END IF;
    UPDATE hapax.job SET state = 2, due_at = at, result = left(of_result, 200), error = NULL,
        forced = false, exclusive = false, answer_status = of_status, answer = of_answer
    WHERE job = of_job;
    IF j.state <> 1 THEN
        -- It was recorded as lost or failed, and was only slow: one attempt has one end.
        DELETE FROM hapax.attempt a
        WHERE a.job = of_job AND a.run = j.run AND a.attempt = j.attempt;
    END IF;
    IF j.resource IS NOT NULL AND hapax.ready_next(h, j.lane, j.resource, at) THEN
        RETURN 3;
    END IF;
    RETURN 1;
END $$;

-- Keeps: "done" and the messages in one commit. `messages` are {tenant, id, type, data, key}; one
-- that names no tenant is of its event's, so that no tenant can use up another's ids.
CREATE FUNCTION hapax.settle(
    of_job uuid, of_fence bigint, of_result text, messages jsonb, now_at timestamptz DEFAULT NULL,
    of_status integer DEFAULT NULL, of_answer text DEFAULT NULL)
RETURNS integer
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    at CONSTANT timestamptz := coalesce(now_at, statement_timestamp());
    settled integer := hapax.done(of_job, of_fence, of_result, at, of_status, of_answer);
BEGIN
    IF settled IN (1, 3) AND messages IS NOT NULL THEN
        -- Keys in one order everywhere, since each is locked until the commit.
        PERFORM hapax.write_message(
            coalesce(m ->> 'tenant', e.tenant), coalesce(m ->> 'id', 'msg_' || gen_random_uuid()),
            m ->> 'type', m -> 'data', m ->> 'key', NULL, e.id, at)
        FROM hapax.job j JOIN hapax.event e ON e.id = j.event,
             jsonb_array_elements(messages) WITH ORDINALITY x (m, n)
        WHERE j.job = of_job
        ORDER BY m ->> 'key' NULLS FIRST, n;
    END IF;
    RETURN settled;
END $$;

-- Keeps: all of these are done, in the transaction of their effects. How many were not, because their
-- fence is lost or they were done before: then the transaction must not commit.
CREATE FUNCTION hapax.done_all(
    jobs uuid[], fences bigint[], results text[], now_at timestamptz DEFAULT NULL)
RETURNS integer
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
SET enable_hashjoin = off
SET enable_mergejoin = off
AS $$
DECLARE
    at CONSTANT timestamptz := coalesce(now_at, statement_timestamp());
    plain uuid[];
    missed integer;
BEGIN
    WITH ended AS (
        UPDATE hapax.job j SET state = 2, due_at = at, result = left(r.result, 200), error = NULL,
            forced = false, exclusive = false
        FROM unnest(jobs, fences, results) r (job, fence, result)
        WHERE j.job = r.job AND j.fence = r.fence AND j.state = 1 AND j.resource IS NULL
        RETURNING j.job)
    SELECT coalesce(array_agg(e.job), '{}') INTO plain FROM ended e;
    IF cardinality(plain) = cardinality(jobs) THEN
        RETURN 0;
    END IF;
    SELECT count(*) INTO missed
    FROM unnest(jobs, fences, results) WITH ORDINALITY r (job, fence, result, n)
    WHERE r.job <> ALL (plain) AND hapax.done(r.job, r.fence, r.result, at) NOT IN (1, 3);
    RETURN missed;
END $$;

-- Keeps: a verdict uses one step of the schedule, once. `how`: 0 by the schedule, 1 by the schedule
-- but not before `wait`, 2 after exactly `wait`, 3 never again, 4 nothing was sent: no step is used, and
-- the wait doubles with each attempt that used none; waits in microseconds. 0 the fence is lost or the job not leased any more, 1 recorded, 3 recorded and others of its resource are ready.
CREATE FUNCTION hapax.failed(
    of_job uuid, of_fence bigint, why text, how integer, wait bigint, dice double precision,
    now_at timestamptz DEFAULT NULL, of_status integer DEFAULT NULL, of_answer text DEFAULT NULL)
RETURNS integer
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    at CONSTANT timestamptz := coalesce(now_at, statement_timestamp());
    h hapax.handler;
    j hapax.job;
    scheduled bigint;
    micros double precision;
BEGIN
    SELECT * INTO j FROM hapax.job x WHERE x.job = of_job FOR UPDATE;
    IF NOT FOUND OR j.fence IS DISTINCT FROM of_fence OR j.state <> 1 THEN
        RETURN 0;
    END IF;
    SELECT * INTO h FROM hapax.handler x WHERE x.handler = j.handler;
    why := left(why, 1200);
    PERFORM hapax.note_attempt(j, 'failed', at, why, of_status, of_answer);
    -- The wait before the attempt after the next step; past the last one there is none.
    scheduled := h.retry[j.steps + 2];
    IF how = 4 THEN
        UPDATE hapax.job SET state = 0, error = why, exclusive = false,
            due_at = at + least(2 ^ least(greatest(j.attempt - j.steps - 1, 0), 16), 300)
                * (0.8 + 0.4 * dice) * interval '1 second'
        WHERE job = of_job;
    ELSIF scheduled IS NULL OR how = 3 THEN
        UPDATE hapax.job SET state = 4, due_at = at, steps = steps + 1, error = why,
            exclusive = false
        WHERE job = of_job;
    ELSE
        micros := scheduled * (0.8 + 0.4 * dice);
        micros := CASE how WHEN 0 THEN micros WHEN 1 THEN greatest(micros, wait) ELSE wait END;
        UPDATE hapax.job SET state = 0, due_at = at + micros * interval '1 microsecond',
            steps = steps + 1, error = why, exclusive = false
        WHERE job = of_job;
    END IF;
    IF j.resource IS NOT NULL AND hapax.ready_next(h, j.lane, j.resource, at) THEN
        RETURN 3;
    END IF;
    RETURN 1;
END $$;

-- Claims that were never begun: as if they had not been, but the right is void.
CREATE FUNCTION hapax.give_back(jobs uuid[], fences bigint[], now_at timestamptz DEFAULT NULL)
RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    at CONSTANT timestamptz := coalesce(now_at, statement_timestamp());
    h hapax.handler;
    j hapax.job;
BEGIN
    FOR j IN
        SELECT x.* FROM unnest(jobs, fences) r (job, fence)
        JOIN hapax.job x ON x.job = r.job AND x.fence = r.fence
        WHERE x.state = 1
        ORDER BY x.job
        FOR UPDATE OF x
    LOOP
        UPDATE hapax.job SET state = 0, due_at = at, attempt = greatest(attempt - 1, 0),
            fence = hapax.next_fence(fence), started_at = NULL, worker = NULL, exclusive = false
        WHERE job = j.job;
        IF j.resource IS NOT NULL THEN
            SELECT * INTO h FROM hapax.handler x WHERE x.handler = j.handler;
            PERFORM hapax.ready_next(h, j.lane, j.resource, at);
        END IF;
    END LOOP;
END $$;

-- In the transaction of the work: locks the marks of these resources, always in the same order, and
-- returns their positions.
CREATE FUNCTION hapax.lock_marks(lanes integer[], resources text[])
RETURNS TABLE (lane integer, resource text, place bigint)
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
#variable_conflict use_column
BEGIN
    FOR lane, resource IN
        SELECT DISTINCT r.lane, r.resource FROM unnest(lanes, resources) r (lane, resource)
        ORDER BY 1, 2
    LOOP
        SELECT m.position INTO place FROM hapax.mark m
        WHERE m.lane = lock_marks.lane AND m.resource = lock_marks.resource
        FOR UPDATE;
        IF NOT FOUND THEN
            INSERT INTO hapax.mark (lane, resource) VALUES (lock_marks.lane, lock_marks.resource)
            ON CONFLICT DO NOTHING;
            SELECT m.position INTO place FROM hapax.mark m
            WHERE m.lane = lock_marks.lane AND m.resource = lock_marks.resource
            FOR UPDATE;
        END IF;
        RETURN NEXT;
    END LOOP;
END $$;

-- In the transaction of the work, under the lock of its mark: a job that is not to run is recorded as
-- stale or held. It was looked at, not attempted: the claim is uncounted, its right void. False: the
-- fence is lost.
CREATE FUNCTION hapax.set_aside(
    of_job uuid, of_fence bigint, to_hold boolean, now_at timestamptz DEFAULT NULL)
RETURNS boolean
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    at CONSTANT timestamptz := coalesce(now_at, statement_timestamp());
    h hapax.handler;
    j hapax.job;
BEGIN
    SELECT * INTO j FROM hapax.job x WHERE x.job = of_job FOR UPDATE;
    IF NOT FOUND OR j.fence IS DISTINCT FROM of_fence OR j.state <> 1 THEN
        RETURN false;
    END IF;
    SELECT * INTO h FROM hapax.handler x WHERE x.handler = j.handler;
    UPDATE hapax.job SET attempt = greatest(attempt - 1, 0), fence = hapax.next_fence(fence),
        started_at = NULL, worker = NULL
    WHERE job = of_job;
    IF to_hold THEN
        PERFORM hapax.hold(h, j, at);
    ELSE
        UPDATE hapax.job SET state = 3, due_at = at, exclusive = false WHERE job = of_job;
    END IF;
    PERFORM hapax.ready_next(h, j.lane, j.resource, at);
    RETURN true;
END $$;

-- Whether a job may still be settled under this fence.
CREATE FUNCTION hapax.is_held(of_job uuid, of_fence bigint) RETURNS boolean
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp AS $$
    SELECT EXISTS (SELECT FROM hapax.job x
                   WHERE x.job = of_job AND x.fence = of_fence AND x.state NOT IN (2, 3, 8));
$$;

-- Makes the jobs of an event that wait for their next attempt due now.
CREATE FUNCTION hapax.hurry(of_event uuid, now_at timestamptz DEFAULT NULL) RETURNS void
LANGUAGE sql SET search_path = pg_catalog, pg_temp AS $$
    UPDATE hapax.job SET due_at = coalesce(now_at, statement_timestamp())
    WHERE job IN (
        SELECT x.job FROM hapax.job x
        WHERE x.job BETWEEN of_event AND hapax.last_job(of_event)
          AND x.state = 0 AND x.due_at > coalesce(now_at, statement_timestamp())
        FOR UPDATE SKIP LOCKED);
$$;

-- When the next job of a handler is due, its lease or its hold ends: never late, as far as the asking
-- node knows (see hapax.claim), and maybe early.
CREATE FUNCTION hapax.next_due(
    of_handler integer, known_lanes integer[], known_since timestamptz[], leases_since timestamptz,
    now_at timestamptz DEFAULT NULL)
RETURNS timestamptz
LANGUAGE plpgsql STABLE
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
SET enable_bitmapscan = off
AS $$
DECLARE
    at CONSTANT timestamptz := coalesce(now_at, statement_timestamp());
    current_lane integer := 0;
    due timestamptz;
    earliest timestamptz;
    busy_resource text;
    next_known integer;
    next_lane integer;
BEGIN
    SELECT x.due_at INTO earliest FROM hapax.job x
    WHERE x.handler = of_handler AND x.state = 1
      AND x.due_at >= coalesce(leases_since, '-infinity')
    ORDER BY x.due_at LIMIT 1;
    -- Nothing happens to a held one before the one at work has ended.
    FOR due, current_lane, busy_resource IN
        SELECT x.due_at, x.lane, x.resource FROM hapax.job x
        WHERE x.handler = of_handler AND x.state = 5 ORDER BY x.due_at LIMIT 64
    LOOP
        EXIT WHEN due >= earliest;
        PERFORM FROM hapax.job x
        WHERE x.lane = current_lane AND x.resource = busy_resource AND x.state = 1;
        IF NOT FOUND THEN
            earliest := due;
            EXIT;
        END IF;
    END LOOP;
    current_lane := 0;
    FOR look IN 1..256 LOOP
        EXIT WHEN earliest <= at;
        SELECT min(k) INTO next_known FROM unnest(known_lanes) k WHERE k > current_lane;
        SELECT x.lane, x.due_at INTO next_lane, due FROM hapax.job x
        WHERE x.handler = of_handler AND x.state = 0 AND x.lane > current_lane
          AND x.lane < coalesce(next_known, 2147483647)
        ORDER BY x.lane, x.due_at, x.job LIMIT 1;
        IF NOT FOUND AND next_known IS NOT NULL THEN
            next_lane := next_known;
            SELECT x.due_at INTO due FROM hapax.job x
            WHERE x.handler = of_handler AND x.state = 0 AND x.lane = next_known
              AND x.due_at >= known_since[array_position(known_lanes, next_known)]
            ORDER BY x.due_at, x.job LIMIT 1;
        ELSIF NOT FOUND THEN
            RETURN earliest;
        END IF;
        current_lane := next_lane;
        earliest := least(earliest, due);
    END LOOP;
    RETURN least(earliest, at);
END $$;

-- Announces a handler of this node; returns its number. Jobs that an earlier order set aside are
-- readied if the current order does not hold them back: they are decided again when claimed.
CREATE FUNCTION hapax.announce(
    of_source text, of_name text, of_retry bigint[], of_lease bigint, of_policy smallint,
    of_start bigint, of_hold bigint, of_hold_max integer, of_go boolean, of_workplace smallint,
    steps_from bigint[], steps_to bigint[], steps_say smallint[], now_at timestamptz DEFAULT NULL)
RETURNS integer
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    at CONSTANT timestamptz := coalesce(now_at, statement_timestamp());
    h hapax.handler;
    known boolean;
BEGIN
    INSERT INTO hapax.handler AS x
        (source, name, retry, lease, policy, start_at, hold, hold_max, go, workplace)
    VALUES (of_source, of_name, of_retry, of_lease, of_policy, of_start, of_hold, of_hold_max, of_go,
            of_workplace)
    ON CONFLICT (source, name) DO UPDATE
    SET retry = excluded.retry, lease = excluded.lease, policy = excluded.policy,
        start_at = excluded.start_at, hold = excluded.hold, hold_max = excluded.hold_max,
        go = excluded.go, workplace = excluded.workplace
    RETURNING x.* INTO h;
    DELETE FROM hapax.transition t
    WHERE t.handler = h.handler AND NOT EXISTS (
        SELECT FROM unnest(steps_from, steps_to, steps_say) s (f, t, says)
        WHERE s.f = t.from_at AND s.t = t.to_at AND s.says = t.says);
    INSERT INTO hapax.transition (handler, from_at, to_at, says)
    SELECT h.handler, s.f, s.t, s.says FROM unnest(steps_from, steps_to, steps_say) s (f, t, says)
    ON CONFLICT DO NOTHING;
    UPDATE hapax.job SET state = 0, due_at = at
    WHERE job IN (
        SELECT w.job FROM hapax.job w
        LEFT JOIN hapax.mark m ON m.lane = w.lane AND m.resource = w.resource
        WHERE w.handler = h.handler AND w.state = 5 AND hapax.guard(h, m.position, w.position) <> 2
        FOR UPDATE OF w SKIP LOCKED);
    IF of_policy IS NULL THEN
        UPDATE hapax.job SET state = 0, due_at = at
        WHERE job IN (
            SELECT w.job FROM hapax.job w WHERE w.handler = h.handler AND w.state = 6
            FOR UPDATE SKIP LOCKED);
    END IF;
    RETURN h.handler;
END $$;

-- Writes the jobs of an event that do not exist yet: on arrival, or when an operator decides.
CREATE FUNCTION hapax.write_jobs(
    of_event uuid, lanes integer[], resources text[], places bigint[], hopeless text[],
    at timestamptz)
RETURNS void
LANGUAGE sql SET search_path = pg_catalog, pg_temp AS $$
    INSERT INTO hapax.job (job, event, handler, lane, state, due_at, resource, position, error)
    SELECT hapax.job_id(of_event, n.lane), of_event, l.handler, n.lane,
        s.state, hapax.first_due(at, h.retry, s.state),
        n.resource, n.place, n.hopeless
    FROM unnest(lanes, resources, places, hopeless) n (lane, resource, place, hopeless)
    CROSS JOIN LATERAL (SELECT CASE WHEN n.hopeless IS NULL THEN 0 ELSE 4 END::smallint) s (state)
    -- Row by row: a join may begin with the handlers, and would then read all lanes of one.
    CROSS JOIN LATERAL (SELECT x.handler FROM hapax.lane x WHERE x.lane = n.lane LIMIT 1) l
    CROSS JOIN LATERAL (SELECT x.retry FROM hapax.handler x WHERE x.handler = l.handler LIMIT 1) h
    ON CONFLICT (job) DO NOTHING;
$$;

-- Runs again the jobs of an event that may run again, or returns what would happen. One row for
-- each of `lanes`: 0 it runs (a job that waits for its next attempt is due now), 1 it is done and
-- stays so, 2 a newer version was applied, 3 it is open as it is, 4 an operator rejected it; null
-- if nothing can be done. An event that waits for review, was rejected there or is pruned has
-- nothing to run again: then there are no rows.
CREATE FUNCTION hapax.replay(
    of_event uuid, lanes integer[], resources text[], places bigint[], hopeless text[],
    force boolean, dry_run boolean, who text, reason text, acted_at timestamptz,
    now_at timestamptz DEFAULT NULL)
RETURNS TABLE (effect integer)
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    at CONSTANT timestamptz := coalesce(now_at, statement_timestamp());
    h hapax.handler;
    j hapax.job;
    n record;
    mark bigint;
    is_there boolean;
    changed boolean := false;
BEGIN
    PERFORM FROM hapax.event e WHERE e.id = of_event AND e.state = 0 AND e.pruned IS NULL
    FOR UPDATE;
    IF NOT FOUND THEN
        RETURN;
    END IF;
    FOR n IN
        SELECT * FROM unnest(lanes, resources, places, hopeless) r (lane, resource, place, hopeless)
    LOOP
        SELECT x.* INTO h FROM hapax.lane l JOIN hapax.handler x ON x.handler = l.handler
        WHERE l.lane = n.lane;
        SELECT x.* INTO j FROM hapax.job x WHERE x.job = hapax.job_id(of_event, n.lane) FOR UPDATE;
        is_there := FOUND;
        SELECT m.position INTO mark FROM hapax.mark m
        WHERE m.lane = n.lane AND m.resource = n.resource;
        effect := CASE
            WHEN is_there AND j.state = 0 AND j.due_at > at THEN 0
            WHEN is_there AND j.state IN (0, 1, 5, 6, 7) THEN 3
            WHEN is_there AND j.state = 2 AND NOT force THEN 1
            WHEN is_there AND j.state = 3 AND NOT force THEN 2
            WHEN is_there AND j.state = 8 AND NOT force THEN 4
            WHEN n.hopeless IS NOT NULL THEN NULL
            WHEN force THEN 0
            WHEN n.place IS NOT NULL AND hapax.guard(h, mark, n.place) = 1 THEN 2
            ELSE 0 END;
        RETURN NEXT;
        CONTINUE WHEN dry_run;
        changed := changed OR effect = 0
            OR (effect = 2 AND (NOT is_there OR j.state = 4));
        IF NOT is_there AND effect IN (0, 2) THEN
            PERFORM hapax.write_jobs(
                of_event, ARRAY[n.lane], ARRAY[n.resource], ARRAY[n.place], ARRAY[n.hopeless], at);
            IF force THEN
                UPDATE hapax.job SET forced = true WHERE job = hapax.job_id(of_event, n.lane);
            END IF;
        ELSIF effect = 2 AND j.state = 4 THEN
            -- A newer version was applied while it was dead: it needs no decision any more.
            UPDATE hapax.job SET state = 3, due_at = at WHERE job = j.job;
        ELSIF effect = 0 AND j.state = 0 THEN
            UPDATE hapax.job SET due_at = at WHERE job = j.job;
        ELSIF effect = 0 THEN
            IF j.state = 2 THEN
                -- The job's own row is about to describe the new run.
                PERFORM hapax.note_attempt(j, 'done', j.due_at, NULL, j.answer_status, j.answer);
            END IF;
            -- A dead job continues its run with a fresh schedule, and alone if it was lost before.
            -- A finished job gets a new run, and with it a new idempotency key.
            UPDATE hapax.job SET state = 0, due_at = at, fence = hapax.next_fence(fence),
                run = run + CASE WHEN j.state = 4 THEN 0 ELSE 1 END,
                attempt = CASE WHEN j.state = 4 THEN attempt ELSE 0 END, steps = 0,
                lost = CASE WHEN j.state = 4 THEN least(lost, 1) ELSE 0 END,
                forced = force, resource = n.resource, position = n.place, result = NULL,
                error = NULL, started_at = NULL, worker = NULL, answer_status = NULL, answer = NULL
            WHERE job = j.job;
        END IF;
    END LOOP;
    -- A replay that changed nothing is not recorded.
    IF changed THEN
        INSERT INTO hapax.action (event, what, who, reason, at)
        VALUES (of_event, 'replay', replay.who, replay.reason, acted_at);
    END IF;
END $$;

-- Keeps: the jobs of an event in review are written once, however many operators approve it or
-- on-time copies arrive. If jobs of it are in review instead, they become ready, whatever the guard
-- decides; or, with `refused`, discarded. True: something waited for this decision, and it is
-- recorded.
CREATE FUNCTION hapax.decide(
    of_event uuid, refused boolean, lanes integer[], resources text[], places bigint[],
    hopeless text[], who text, reason text, acted_at timestamptz, now_at timestamptz DEFAULT NULL)
RETURNS boolean
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    at CONSTANT timestamptz := coalesce(now_at, statement_timestamp());
BEGIN
    UPDATE hapax.event SET state = CASE WHEN refused THEN 2 ELSE 0 END
    WHERE id = of_event AND state = 1;
    IF FOUND THEN
        IF NOT refused THEN
            PERFORM hapax.write_jobs(of_event, lanes, resources, places, hopeless, at);
        END IF;
    ELSE
        UPDATE hapax.job SET state = CASE WHEN refused THEN 8 ELSE 0 END, due_at = at,
            forced = NOT refused, error = CASE WHEN refused THEN error END,
            fence = CASE WHEN refused THEN hapax.next_fence(fence) ELSE fence END
        WHERE job BETWEEN of_event AND hapax.last_job(of_event) AND state = 7;
        IF NOT FOUND THEN
            RETURN false;
        END IF;
    END IF;
    INSERT INTO hapax.action (event, what, who, reason, at)
    VALUES (of_event, CASE WHEN refused THEN 'reject' ELSE 'approve' END, decide.who, decide.reason,
            acted_at);
    RETURN true;
END $$;

-- A person gives up the dead letters of an event, or only that of one handler. True: there was one, and
-- it is recorded.
CREATE FUNCTION hapax.discard(
    of_event uuid, of_handler text, who text, reason text, acted_at timestamptz,
    now_at timestamptz DEFAULT NULL)
RETURNS boolean
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    at CONSTANT timestamptz := coalesce(now_at, statement_timestamp());
BEGIN
    UPDATE hapax.job x SET state = 8, due_at = at, fence = hapax.next_fence(x.fence)
    WHERE x.job BETWEEN of_event AND hapax.last_job(of_event) AND x.state = 4
      AND (of_handler IS NULL
           OR (SELECT h.name FROM hapax.handler h WHERE h.handler = x.handler) = of_handler);
    IF NOT FOUND THEN
        RETURN false;
    END IF;
    INSERT INTO hapax.action (event, what, who, reason, at)
    VALUES (of_event, 'discard', discard.who, discard.reason, acted_at);
    RETURN true;
END $$;
