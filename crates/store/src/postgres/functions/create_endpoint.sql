-- Creates an endpoint, which gets the messages that are published from this commit on. verdict: 0 created, 3
-- its uid is taken, 4 the tenant or the database has as many endpoints as it may have. receivers_most: the
-- most endpoints of the tenant whose address its receiving party may choose; NULL for an endpoint of an
-- operator.
CREATE OR REPLACE FUNCTION hapax.create_endpoint(
    of_id uuid, of_tenant text, of_settings text, of_uid text, of_types text[], of_version text,
    of_thin boolean, of_max integer, of_retry bigint[], of_lease bigint, of_secrets bytea,
    of_headers bytea, of_keys bigint[], who text, reason text, acted_at timestamptz, most integer,
    now_at timestamptz DEFAULT NULL, of_order boolean DEFAULT false, of_parks boolean DEFAULT false,
    of_auto_disable boolean DEFAULT true, of_interval bigint DEFAULT NULL,
    receivers_most integer DEFAULT NULL, OUT verdict integer, OUT created_at timestamptz)
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
#variable_conflict use_column
DECLARE
    at CONSTANT timestamptz := coalesce(now_at, statement_timestamp());
    number integer;
BEGIN
    PERFORM hapax.endpoint_lock(of_tenant);
    created_at := at;
    verdict := CASE
        WHEN (SELECT count(*) FROM hapax.endpoint e
              WHERE e.tenant = of_tenant AND e.deleted_at IS NULL) >= most
            OR (SELECT count(*) FROM hapax.endpoint e
                WHERE receivers_most IS NOT NULL AND e.tenant = of_tenant AND e.deleted_at IS NULL
                  AND e.settings::jsonb ->> 'address_by' = 'receiver') >= receivers_most
            OR (SELECT max(e.endpoint) FROM hapax.endpoint e) >= 16777215
        THEN 4
        WHEN EXISTS (SELECT FROM hapax.endpoint e
                     WHERE e.tenant = of_tenant AND e.uid = of_uid AND e.deleted_at IS NULL)
        THEN 3
        ELSE 0 END;
    IF verdict <> 0 THEN
        RETURN;
    END IF;
    INSERT INTO hapax.endpoint AS e (id, tenant, settings, uid, types, api_version, is_thin,
                                max_in_flight, retry, lease, secrets, headers, key_ids, created_at,
                                keeps_order, parks_dead, auto_disable, rate_interval)
    VALUES (of_id, of_tenant, of_settings, of_uid, of_types, of_version, of_thin, of_max, of_retry,
            of_lease, of_secrets, of_headers, of_keys, at, of_order, of_parks,
            of_auto_disable, of_interval)
    RETURNING e.endpoint INTO number;
    INSERT INTO hapax.endpoint_state (endpoint) VALUES (number);
    INSERT INTO hapax.sending_action (endpoint, what, who, reason, at)
    VALUES (number, 'create', create_endpoint.who, create_endpoint.reason, acted_at);
END $$;
