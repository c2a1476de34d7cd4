-- Keeps: attempt+1 and a new fence, committed before the work. Claims up to `wanted` due jobs of a
-- handler, over its lanes in turn from the one after after_lane. `guarded`: order is decided here, and the
-- resource is leased with the job. Otherwise order is decided in the work's own transaction. The last row has
-- no job: it returns the events whose jobs the guard set aside, the first lane, where the next check of parked
-- jobs begins, and the time up to which this claim has read.
--
-- known_lanes (sorted), known_since: as far as the calling node knows, these lanes have no job that was due
-- before that time. leases_since: the node has seen every lease that ended before this time. While another
-- transaction stays open, index entries of jobs that were claimed since it began cannot be removed, and every
-- claim would pass all of them. These values are a hint: a slow commit or a locked row may lie before them,
-- so a node claims without them every second or so.
CREATE OR REPLACE FUNCTION hapax.claim(
    of_handler integer, wanted integer, who text, guarded boolean, after_lane integer,
    seen_lane integer, seen_resource text, known_lanes integer[], known_since timestamptz[],
    leases_since timestamptz, now_at timestamptz DEFAULT NULL)
RETURNS TABLE (
    job uuid, fence bigint, attempt integer, steps integer, run integer, leased_until timestamptz, event uuid,
    lane integer, tenant text, event_id bytea, event_type bytea, occurred_at timestamptz,
    received_at timestamptz, resource text, place bigint, forced boolean, alone boolean,
    headers bytea, body bytea, body_hash uuid,
    set_aside uuid[], look_lane integer, look_resource text, lanes_seen integer[],
    seen_until timestamptz[], leases_until timestamptz)
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
-- A plan that was made while the tables were small must work for large ones too. The functions that
-- this one calls make their plans under the same settings.
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
    leases record;
    due record;
    got record;
    taken uuid[] := '{}';
    current_lane integer;
    share integer;
    room integer;
    since timestamptz;
    is_pausing boolean;
BEGIN
    lanes_seen := '{}';
    seen_until := '{}';
    set_aside := '{}';
    look_lane := seen_lane;
    look_resource := seen_resource;
    -- This comes before the handler is read, so that a pause that was answered is seen.
    is_pausing := NOT pg_try_advisory_xact_lock_shared(hapax.pause_lock(), of_handler);
    SELECT * INTO h FROM hapax.handler WHERE handler = of_handler;
    IF NOT FOUND THEN
        RETURN;
    END IF;
    IF is_pausing OR h.paused_at IS NOT NULL THEN
        lane := after_lane;
        leases_until := leases_since;
        RETURN NEXT;
        RETURN;
    END IF;
    leases := hapax.end_leases(h, leases_since, at);
    leases_until := leases.ended_until;
    IF leases.ended > 0 THEN
        -- A lost job is due from the end of its lease on, which may be long ago.
        known_lanes := NULL;
    END IF;
    IF h.policy IS NOT NULL THEN
        SELECT * INTO look_lane, look_resource
        FROM hapax.wake_parked(h, at, look_lane, look_resource);
    END IF;
    IF h.policy <> hapax.order_policy('latest') THEN
        set_aside := hapax.end_holds(h, at);
    END IF;

    due := hapax.due_lanes(of_handler, least(wanted, 64), after_lane, known_lanes, known_since, at);
    -- First each lane's share, then the rest for lanes with more jobs.
    share := ceil(wanted::numeric / greatest(cardinality(due.lanes), 1));
    <<rounds>>
    FOR round IN 1..2 LOOP
        FOREACH current_lane IN ARRAY due.lanes LOOP
            room := wanted - cardinality(taken);
            EXIT rounds WHEN room <= 0;
            IF round = 1 THEN
                room := least(room, share);
            END IF;
            since := coalesce(
                known_since[array_position(known_lanes, current_lane)], '-infinity');
            IF guarded AND h.policy IS NOT NULL THEN
                got := hapax.take_in_order(h, current_lane, room, since, taken = '{}', who, at);
            ELSE
                got := hapax.take_unordered(h, current_lane, room, since, taken = '{}', who, at);
            END IF;
            taken := taken || got.taken;
            set_aside := set_aside || got.aside;
            IF got.seen_until IS NOT NULL THEN
                lanes_seen := lanes_seen || current_lane;
                seen_until := seen_until || (got.seen_until - hapax.commit_slack());
            END IF;
            EXIT rounds WHEN got.by_itself;
        END LOOP;
    END LOOP;
    IF h.policy IS NOT NULL AND NOT guarded AND taken <> '{}' THEN
        PERFORM hapax.prepare_marks(h, taken);
    END IF;

    RETURN QUERY
    SELECT x.job, x.fence, x.attempt, x.steps, x.run, x.due_at, x.event, x.lane, e.tenant,
        e.event_id, e.event_type, e.occurred_at, e.received_at, x.resource, x.position, x.forced,
        x.lost > 0 AND h.workplace = hapax.workplace('node'),
        b.headers, b.body, e.body_hash, NULL::uuid[], NULL::integer, NULL::text,
        NULL::integer[], NULL::timestamptz[], NULL::timestamptz
    FROM unnest(taken) WITH ORDINALITY t (job, n)
    JOIN hapax.job x ON x.job = t.job
    JOIN hapax.event e ON e.id = x.event
    JOIN hapax.body b ON b.id = x.event
    ORDER BY t.n;
    job := NULL;
    lane := coalesce(due.lanes[1], due.last_lane);
    RETURN NEXT;
END $$;
