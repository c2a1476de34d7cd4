-- How many deliveries a plan would take. Null if there is no such endpoint.
CREATE OR REPLACE FUNCTION hapax.count_plan(
    of_endpoint uuid, which text, since timestamptz, until timestamptz)
RETURNS bigint
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    e record;
    bounds record;
    counted bigint;
BEGIN
    SELECT x.endpoint, x.tenant, x.types, x.api_version INTO e FROM hapax.endpoint x
    WHERE x.id = of_endpoint AND x.deleted_at IS NULL;
    IF NOT FOUND THEN
        RETURN NULL;
    END IF;
    IF which <> 'dead' THEN
        bounds := hapax.plan_bounds(since, until);
    END IF;
    IF which = 'dead' THEN
        SELECT count(*) INTO counted FROM hapax.delivery d
        WHERE d.endpoint = e.endpoint AND d.state = hapax.delivery_state('dead')
          AND d.due_at >= since AND d.due_at < until;
    ELSIF which = 'all' THEN
        SELECT count(*) INTO counted FROM hapax.delivery d
        JOIN hapax.message m ON m.message = d.message
        WHERE d.endpoint = e.endpoint AND d.message BETWEEN bounds.first AND bounds.last
          AND m.created_at >= since AND m.created_at < until;
    ELSE
        SELECT count(*) INTO counted FROM hapax.message m
        WHERE m.message BETWEEN bounds.first AND bounds.last AND m.body IS NOT NULL
          AND m.created_at >= since AND m.created_at < until AND m.tenant = e.tenant
          AND hapax.wants_message(e.types, e.api_version, m.type, m.api_version)
          AND (SELECT d.message FROM hapax.delivery d
               WHERE d.message = m.message AND d.endpoint = e.endpoint LIMIT 1) IS NULL;
    END IF;
    RETURN counted;
END $$;
