-- Changes an endpoint; the change holds for the next claim on every node. act: 0 replace settings and
-- sealed values if it still has old_version, 1 disable, 2 enable, 3 delete, 4 disable and 5 enable for its
-- receiving party. verdict: 0 changed, 1 deleted, 2 there is no such endpoint, 3 its uid is taken, 5 it has
-- another version, 6 an operator disabled it. With 0, the other columns hold the row as it is now.
-- Keeps: a receiving party can neither enable an endpoint that an operator disabled nor replace the reason.
CREATE OR REPLACE FUNCTION hapax.change_endpoint(
    of_id uuid, act integer, old_version bigint, of_settings text, of_uid text, of_types text[],
    of_version text, of_thin boolean, of_max integer, of_retry bigint[], of_lease bigint,
    of_secrets bytea, of_headers bytea, of_keys bigint[], disable_reason text, who text, reason text,
    acted_at timestamptz, now_at timestamptz DEFAULT NULL, of_order boolean DEFAULT false,
    of_parks boolean DEFAULT false, of_auto_disable boolean DEFAULT true,
    of_interval bigint DEFAULT NULL,
    OUT verdict integer, OUT id uuid, OUT tenant text, OUT settings text, OUT secrets bytea,
    OUT headers bytea, OUT version bigint, OUT created_at timestamptz, OUT disabled_at timestamptz,
    OUT disabled_reason text, OUT endpoint integer, OUT failing text, OUT disabled_by text)
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
#variable_conflict use_column
DECLARE
    at CONSTANT timestamptz := coalesce(now_at, statement_timestamp());
    by_receiver CONSTANT boolean := act IN (4 /* disable */, 5 /* enable */);
    e hapax.endpoint;
    before hapax.endpoint;
BEGIN
    act := CASE act WHEN 4 THEN 1 WHEN 5 THEN 2 ELSE act END;
    IF act = 0 THEN
        PERFORM hapax.endpoint_lock(x.tenant) FROM hapax.endpoint x WHERE x.id = of_id;
    END IF;
    -- The state row is locked before the endpoint, as everywhere: no claim parks or leases a
    -- delivery while the endpoint changes.
    PERFORM FROM hapax.endpoint_state s
    WHERE s.endpoint = (SELECT x.endpoint FROM hapax.endpoint x WHERE x.id = of_id)
    FOR UPDATE;
    SELECT * INTO e FROM hapax.endpoint x WHERE x.id = of_id AND x.deleted_at IS NULL FOR UPDATE;
    verdict := CASE
        WHEN NOT FOUND THEN 2
        WHEN act = 0 AND e.version <> old_version THEN 5
        WHEN act = 0 AND EXISTS (
            SELECT FROM hapax.endpoint x
            WHERE x.tenant = e.tenant AND x.uid = of_uid AND x.deleted_at IS NULL
              AND x.endpoint <> e.endpoint)
        THEN 3
        WHEN act = 2 AND by_receiver AND e.disabled_at IS NOT NULL
            AND coalesce(e.disabled_by, 'operator') = 'operator'
        THEN 6
        WHEN act = 3 THEN 1
        ELSE 0 END;
    IF verdict > 1 THEN
        RETURN;
    END IF;
    before := e;
    IF act = 0 THEN
        IF e.keeps_order AND NOT of_order OR e.parks_dead AND NOT of_parks THEN
            UPDATE hapax.endpoint_state s SET unpark_from = 0 WHERE s.endpoint = e.endpoint;
            -- A claim sees only endpoints with ready deliveries.
            PERFORM hapax.unpark(e.endpoint, at);
        END IF;
        UPDATE hapax.endpoint x
        SET settings = of_settings, uid = of_uid, types = of_types, api_version = of_version,
            is_thin = of_thin, max_in_flight = of_max, retry = of_retry, lease = of_lease,
            secrets = of_secrets, headers = of_headers, key_ids = of_keys, keeps_order = of_order,
            parks_dead = of_parks, auto_disable = of_auto_disable,
            rate_interval = of_interval, version = x.version + 1
        WHERE x.endpoint = e.endpoint RETURNING x.* INTO e;
    ELSIF act = 3 THEN
        -- The row stays, because deliveries name it; its secrets are deleted.
        UPDATE hapax.endpoint x
        SET deleted_at = at, deleted_in = pg_current_xact_id(), orphans = true, secrets = '', headers = NULL, key_ids = '{}', version = x.version + 1
        WHERE x.endpoint = e.endpoint;
    ELSIF act = 2 OR NOT by_receiver OR e.disabled_at IS NULL THEN
        UPDATE hapax.endpoint x
        SET disabled_at = CASE act WHEN 1 THEN at END,
            disabled_reason = CASE act WHEN 1 THEN disable_reason END,
            disabled_by = CASE WHEN act = 2 THEN NULL WHEN by_receiver THEN 'receiver' ELSE 'operator' END,
            version = x.version + 1
        WHERE x.endpoint = e.endpoint RETURNING x.* INTO e;
        IF act = 2 THEN
            UPDATE hapax.endpoint_state s
            SET circuit = (hapax.judge_circuit(s, 5, NULL, e.max_in_flight, at)).circuit,
                open_until = (hapax.judge_circuit(s, 5, NULL, e.max_in_flight, at)).open_until
            WHERE s.endpoint = e.endpoint AND s.open_until > at;
        END IF;
        IF act = 2 AND before.disabled_at IS NOT NULL THEN
            -- As hapax_core::rate_limit::RELEASE_FOR.
            UPDATE hapax.endpoint_state s SET spread_until = at + interval '1 minute'
            WHERE s.endpoint = e.endpoint;
        END IF;
        PERFORM hapax.publish_standing(before, at);
    END IF;
    IF act = 3 OR e.version <> before.version THEN
        INSERT INTO hapax.sending_action (endpoint, what, who, reason, at)
        VALUES (e.endpoint,
                CASE act WHEN 0 THEN 'change' WHEN 1 THEN 'disable' WHEN 2 THEN 'enable' ELSE 'delete' END,
                change_endpoint.who, coalesce(change_endpoint.reason, disable_reason), acted_at);
    END IF;
    SELECT e.id, e.tenant, e.settings, e.secrets, e.headers, e.version, e.created_at, e.disabled_at,
           e.disabled_reason, e.endpoint, e.failing, e.disabled_by
    INTO id, tenant, settings, secrets, headers, version, created_at, disabled_at, disabled_reason,
         endpoint, failing, disabled_by;
END $$;
