-- Records a plan with its count. False if there is no such endpoint. The same id twice is one plan: the caller
-- compares the hash of its request with the stored one.
CREATE OR REPLACE FUNCTION hapax.create_plan(
    of_id uuid, of_endpoint uuid, which text, since timestamptz, until timestamptz, rate integer,
    who text, reason text, request uuid, now_at timestamptz DEFAULT NULL)
RETURNS boolean
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    at CONSTANT timestamptz := coalesce(now_at, statement_timestamp());
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
                            passed, last_message, who, reason, created_at, request)
    VALUES (of_id, number, create_plan.which, create_plan.since, ends_at, create_plan.until,
            create_plan.rate, counted, at, bounds.first - 1, bounds.last, create_plan.who,
            create_plan.reason, at, create_plan.request)
    ON CONFLICT (id) DO NOTHING;
    RETURN true;
END $$;
