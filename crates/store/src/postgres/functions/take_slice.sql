-- Keeps: a plan takes each event once. The acts on the events of a slice, the plan's place and its counts are
-- one commit. The plan is fenced by its place: held is false if the slice does not begin there, or
-- the plan has ended, or another node runs it; then nothing has changed. act: replay, approve,
-- reject or discard. Jobs that ended, died or went to review after the plan was made stay as they
-- are. Only a replay for one handler writes a job that an event never had.
-- job_counts: how many of lanes, resources, places and hopeless belong to each event. changed: the hashes of
-- the events that something happened to.
--
-- A user's transaction may hold the row of a job. The slice waits for that row for at most a second. Then the
-- slice ends before that event, and the next slice begins with it.
CREATE OR REPLACE FUNCTION hapax.take_slice(
    of_plan uuid, after uuid, through uuid, is_last boolean, act text, force boolean, of_handler text,
    of_events uuid[], job_counts integer[], lanes integer[], resources text[], places bigint[],
    hopeless text[], now_at timestamptz DEFAULT NULL, OUT held boolean, OUT changed uuid[])
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
SET lock_timeout = '1s'
AS $$
DECLARE
    at CONSTANT timestamptz := coalesce(now_at, statement_timestamp());
    p hapax.plan;
    reached uuid := after;
    low integer := 1;
    high integer;
    is_changed boolean;
    is_blocked boolean := false;
BEGIN
    changed := '{}';
    SELECT x.* INTO p FROM hapax.plan x
    WHERE x.id = of_plan AND x.state = 'running' AND x.passed_event = after
    FOR UPDATE SKIP LOCKED;
    held := FOUND;
    IF NOT held THEN
        RETURN;
    END IF;
    FOR n IN 1..cardinality(of_events) LOOP
        high := low + job_counts[n] - 1;
        BEGIN
            IF act = 'replay' THEN
                SELECT coalesce(bool_or(r.effect = 0), false) INTO is_changed FROM hapax.replay(
                    of_events[n], lanes[low:high], resources[low:high], places[low:high],
                    hopeless[low:high], force, false, p.who, p.reason, p.created_at, now_at,
                    p.created_at, of_handler IS NOT NULL) r;
            ELSIF act = 'discard' THEN
                is_changed := hapax.discard(
                    of_events[n], of_handler, p.who, p.reason, p.created_at, now_at, p.created_at);
            ELSE
                is_changed := hapax.decide(
                    of_events[n], act = 'reject', lanes[low:high], resources[low:high],
                    places[low:high], hopeless[low:high], p.who, p.reason, p.created_at, now_at,
                    p.created_at);
            END IF;
        EXCEPTION WHEN lock_not_available THEN
            is_blocked := true;
        END;
        EXIT WHEN is_blocked;
        low := high + 1;
        reached := of_events[n];
        IF is_changed THEN
            p.done := p.done + 1;
            changed := changed || (SELECT e.hash FROM hapax.event e WHERE e.id = reached);
        ELSE
            p.skipped := p.skipped + 1;
        END IF;
    END LOOP;
    UPDATE hapax.plan x
    SET passed_event = CASE WHEN is_blocked THEN reached ELSE through END,
        done = p.done, skipped = p.skipped,
        state = CASE WHEN is_last AND NOT is_blocked THEN 'done' ELSE 'running' END,
        ended_at = CASE WHEN is_last AND NOT is_blocked THEN at END,
        next_at = CASE
            -- This comes after the wait for the lock, which may have taken a second.
            WHEN is_blocked THEN coalesce(now_at, clock_timestamp()) + interval '1 second'
            WHEN p.rate IS NULL THEN at
            ELSE greatest(p.next_at, at - interval '1 second')
                + cardinality(of_events) * interval '1 second' / p.rate END
    WHERE x.id = p.id;
END $$;
