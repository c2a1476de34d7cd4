-- Announces a handler of this node; returns its number. Jobs that an earlier order set aside are
-- readied, unless the current order holds them back. Their order is decided again when they are
-- claimed.
CREATE OR REPLACE FUNCTION hapax.announce(
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
    UPDATE hapax.job SET state = hapax.job_state('ready'), due_at = at
    WHERE job IN (
        SELECT w.job FROM hapax.job w
        LEFT JOIN hapax.mark m ON m.lane = w.lane AND m.resource = w.resource
        WHERE w.handler = h.handler AND w.state = hapax.job_state('held')
          AND hapax.guard(h, m.position, w.position) <> hapax.order_verdict('hold')
        FOR UPDATE OF w SKIP LOCKED);
    IF of_policy IS NULL THEN
        UPDATE hapax.job SET state = hapax.job_state('ready'), due_at = at
        WHERE job IN (
            SELECT w.job FROM hapax.job w
            WHERE w.handler = h.handler AND w.state = hapax.job_state('parked')
            FOR UPDATE SKIP LOCKED);
    END IF;
    RETURN h.handler;
END $$;
