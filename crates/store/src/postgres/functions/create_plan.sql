-- Keeps: at most one plan of an endpoint runs of those that must run alone. The index plan_alone decides the race.
-- Records a plan with its count. Returns false if there is no such endpoint. Returns true without a row of this id
-- if the plan must run alone and another one of its endpoint runs. waits_for: the transactions whose messages a
-- backfill must find although they are not committed yet; see hapax.run_plan. The same id twice is one plan: the caller
-- compares the hash of its request with the stored hash.
CREATE OR REPLACE FUNCTION hapax.create_plan(
    of_id uuid, of_endpoint uuid, which text, since timestamptz, until timestamptz, rate integer,
    who text, reason text, request uuid, alone boolean, now_at timestamptz DEFAULT NULL)
RETURNS boolean
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    at CONSTANT timestamptz := coalesce(now_at, statement_timestamp());
    -- These are read before the count: what has ended by now is counted.
    waits_for CONSTANT text[] := CASE WHEN which = 'missing' THEN hapax.open_publishers() ELSE '{}' END;
    ends_at CONSTANT timestamptz := least(create_plan.until, at);
    counted CONSTANT bigint := hapax.count_plan(of_endpoint, which, since, ends_at);
    bounds record;
    number integer;
BEGIN
    SELECT e.endpoint INTO number FROM hapax.endpoint e
    WHERE e.id = of_endpoint AND e.deleted_at IS NULL;
    IF NOT FOUND OR counted IS NULL THEN
        RETURN false;
    END IF;
    bounds := hapax.plan_bounds(since, ends_at);
    INSERT INTO hapax.plan (id, endpoint, which, since_at, until_at, asked_until, rate, total, next_at,
                            passed, last_message, who, reason, created_at, request, alone, waits_for)
    SELECT of_id, number, create_plan.which, create_plan.since, ends_at, create_plan.until,
           create_plan.rate, counted, at, bounds.first - 1,
           -- The sequence also covers messages of transactions that are still open.
           CASE WHEN waits_for = '{}' THEN bounds.last
                ELSE (SELECT n.last_value FROM hapax.message_number n) END,
           create_plan.who, create_plan.reason, at, create_plan.request, create_plan.alone, waits_for
    -- A plan of an operator, which does not run alone, is not in that index.
    WHERE NOT create_plan.alone OR NOT EXISTS (
        SELECT 1 FROM hapax.plan p
        WHERE p.endpoint = number AND p.state = 'running' AND p.id <> of_id)
    ON CONFLICT DO NOTHING;
    RETURN true;
END $$;
