-- Keeps: a plan takes each delivery once. The slice, its place and its counts are one commit, under the lock of
-- the plan's row, so that no two nodes run the same plan at once. Takes at most `most` deliveries.
-- This function also keeps: a backfill covers the messages of transactions that were open when the plan was
-- made. Their numbers may be lower than those that the plan has passed. So the plan waits for these
-- transactions and passes its span again. False if the plan is not due, or has ended, or another node runs
-- it. Plans over events: hapax.take_slice.
CREATE OR REPLACE FUNCTION hapax.run_plan(
    of_plan uuid, most integer, now_at timestamptz DEFAULT NULL)
RETURNS boolean
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
#variable_conflict use_column
DECLARE
    at CONSTANT timestamptz := coalesce(now_at, statement_timestamp());
    p hapax.plan;
    e hapax.endpoint;
    d hapax.delivery;
    m record;
    k record;
    room integer;
    numbers bigint[];
    number bigint;
    is_changed boolean;
    is_over boolean;
    is_waiting boolean := false;
BEGIN
    SELECT x.* INTO p FROM hapax.plan x
    WHERE x.id = of_plan AND x.state = 'running' AND x.next_at <= at AND x.events IS NULL
    FOR UPDATE SKIP LOCKED;
    IF NOT FOUND THEN
        RETURN false;
    END IF;
    SELECT x.* INTO e FROM hapax.endpoint x WHERE x.endpoint = p.endpoint AND x.deleted_at IS NULL;
    IF NOT FOUND THEN
        UPDATE hapax.plan x SET state = 'cancelled', ended_at = at WHERE x.id = p.id;
        RETURN true;
    END IF;
    room := CASE WHEN p.rate IS NULL THEN most ELSE least(most, greatest(p.rate / 4, 1)) END;
    IF p.which = 'missing' THEN
        SELECT coalesce(array_agg(l.message ORDER BY l.message), '{}') INTO numbers FROM (
            SELECT x.message FROM hapax.message x
            WHERE x.message > p.passed AND x.message <= p.last_message AND x.body IS NOT NULL
            ORDER BY x.message LIMIT most) l;
    ELSIF p.which = 'dead' THEN
        SELECT coalesce(array_agg(l.message ORDER BY l.due_at, l.message), '{}') INTO numbers FROM (
            SELECT x.message, x.due_at FROM hapax.delivery x
            WHERE x.endpoint = p.endpoint AND x.state = hapax.delivery_state('dead')
              AND (x.due_at, x.message) > (p.passed_at, p.passed)
              AND x.due_at >= p.since_at AND x.due_at < p.until_at
            ORDER BY x.due_at, x.message LIMIT room) l;
    ELSE
        SELECT coalesce(array_agg(l.message ORDER BY l.message), '{}') INTO numbers FROM (
            SELECT x.message FROM hapax.delivery x
            WHERE x.endpoint = p.endpoint AND x.message > p.passed AND x.message <= p.last_message
            ORDER BY x.message LIMIT room) l;
    END IF;
    is_over := cardinality(numbers) < CASE WHEN p.which = 'missing' THEN most ELSE room END;
    -- The locks of keys come before those of rows, and in one order everywhere.
    FOR k IN
        SELECT DISTINCT x.key FROM hapax.message x
        WHERE x.message = ANY (numbers) AND x.tenant = e.tenant AND x.key IS NOT NULL ORDER BY x.key
    LOOP
        PERFORM hapax.key_lock(e.tenant, k.key);
    END LOOP;
    FOREACH number IN ARRAY numbers LOOP
        IF room <= 0 THEN
            is_over := false;
            EXIT;
        END IF;
        -- The message is locked, so that retention does not delete its bytes meanwhile.
        SELECT x.tenant, x.type, x.key, x.api_version, x.created_at INTO m FROM hapax.message x
        WHERE x.message = number AND x.body IS NOT NULL FOR SHARE;
        CONTINUE WHEN NOT FOUND;
        IF p.which = 'missing' THEN
            p.passed := number;
            CONTINUE WHEN m.tenant <> e.tenant OR m.created_at < p.since_at
                OR m.created_at >= p.until_at
                OR NOT hapax.wants_message(e.types, e.api_version, m.type, m.api_version);
            INSERT INTO hapax.delivery (message, endpoint, state, due_at, key, place)
            VALUES (number, e.endpoint, hapax.delivery_state('ready'),
                    at + coalesce(e.retry[1], 0) * (0.8 + 0.4 * random()) * interval '1 microsecond',
                    m.key, CASE WHEN m.key IS NOT NULL THEN nextval('hapax.message_number') END)
            ON CONFLICT DO NOTHING;
            is_changed := FOUND;
            CONTINUE WHEN NOT is_changed;
        ELSE
            SELECT x.* INTO d FROM hapax.delivery x
            WHERE x.message = number AND x.endpoint = p.endpoint FOR UPDATE;
            CONTINUE WHEN NOT FOUND;
            IF p.which = 'dead' THEN
                -- The delivery may have changed before it was locked.
                CONTINUE WHEN d.state <> hapax.delivery_state('dead') OR d.due_at >= p.until_at;
                p.passed := number;
                p.passed_at := d.due_at;
            ELSE
                p.passed := number;
                CONTINUE WHEN m.created_at < p.since_at OR m.created_at >= p.until_at;
            END IF;
            is_changed := hapax.send_again(d, e.parks_dead, at);
            IF d.key IS NOT NULL THEN
                PERFORM hapax.ready_next_delivery(p.endpoint, d.key, at);
            END IF;
        END IF;
        room := room - 1;
        IF NOT is_changed THEN
            p.skipped := p.skipped + 1;
            CONTINUE;
        END IF;
        p.done := p.done + 1;
        INSERT INTO hapax.sending_action (endpoint, message, what, who, reason, at)
        VALUES (p.endpoint, number, CASE p.which WHEN 'missing' THEN 'backfill' ELSE 'replay' END,
                p.who, p.reason, p.created_at);
    END LOOP;
    IF is_over AND p.waits_for <> '{}' THEN
        is_over := false;
        is_waiting := p.waits_for && hapax.open_publishers();
        IF NOT is_waiting THEN
            p.waits_for := '{}';
            p.passed := (hapax.plan_bounds(p.since_at, p.until_at)).first - 1;
        END IF;
    END IF;
    -- The next slice is due after the time that this slice was allowed to take.
    UPDATE hapax.plan x
    SET passed_at = p.passed_at, passed = p.passed, done = p.done, skipped = p.skipped, waits_for = p.waits_for,
        state = CASE WHEN is_over THEN 'done' ELSE 'running' END,
        ended_at = CASE WHEN is_over THEN at END,
        next_at = CASE
            WHEN is_waiting THEN at + interval '1 second'
            WHEN p.rate IS NULL THEN at ELSE greatest(p.next_at, at - interval '1 second')
            + least(most, greatest(p.rate / 4, 1)) * interval '1 second' / p.rate END
    WHERE x.id = p.id;
    RETURN true;
END $$;
