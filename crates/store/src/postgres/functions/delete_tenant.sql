-- Begins to delete the data of a tenant, or returns the deletion that is under way. Its endpoints, the
-- secrets of its sources and its links to the portal are deleted with this commit; hapax.erase deletes the
-- other data. Keeps: one deletion of a tenant at a time. The lock of the tenant's endpoints decides a race
-- between two calls.
CREATE OR REPLACE FUNCTION hapax.delete_tenant(
    of_tenant text, who text, reason text, acted_at timestamptz, now_at timestamptz DEFAULT NULL)
RETURNS hapax.tenant_deletion
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
#variable_conflict use_column
DECLARE
    at CONSTANT timestamptz := coalesce(now_at, statement_timestamp());
    d hapax.tenant_deletion;
    e record;
    s record;
    gone integer := 0;
BEGIN
    PERFORM hapax.endpoint_lock(of_tenant);
    SELECT * INTO d FROM hapax.tenant_deletion x WHERE x.tenant = of_tenant;
    IF FOUND AND d.ended_at IS NULL THEN
        RETURN d;
    END IF;
    FOR e IN
        SELECT x.id FROM hapax.endpoint x
        WHERE x.tenant = of_tenant AND x.deleted_at IS NULL ORDER BY x.endpoint
    LOOP
        PERFORM hapax.change_endpoint(
            e.id, 3, 0, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL,
            delete_tenant.who, delete_tenant.reason, acted_at, at);
        gone := gone + 1;
    END LOOP;
    -- Erases the text that operators wrote about the endpoints, including endpoints that were
    -- deleted before. The schedule stays, because attempts under way still have to end.
    UPDATE hapax.endpoint x
    SET uid = NULL,
        settings = (x.settings::jsonb - 'uid' - 'description' - 'metadata' - 'header_names'
                    || '{"url": "erased:"}')::text
    WHERE x.tenant = of_tenant;
    PERFORM FROM hapax.source_secret_version v FOR UPDATE;
    FOR s IN DELETE FROM hapax.source_secret x WHERE x.tenant = of_tenant RETURNING x.source LOOP
        INSERT INTO hapax.source_secret_action (tenant, source, what, who, reason, at)
        VALUES (of_tenant, s.source, 'delete', delete_tenant.who, delete_tenant.reason, acted_at);
        UPDATE hapax.source_secret_version v SET version = v.version + 1;
    END LOOP;
    DELETE FROM hapax.portal_link x WHERE x.tenant = of_tenant;
    DELETE FROM hapax.portal_ping x WHERE x.tenant = of_tenant;
    DELETE FROM hapax.secret_use x WHERE x.tenant = of_tenant;
    INSERT INTO hapax.tenant_deletion AS x
        (tenant, began_at, began_in, next_at, last_message, endpoints, who, reason)
    VALUES (of_tenant, at, pg_current_xact_id(), at,
            -- The sequence also covers messages of transactions that are still open.
            (SELECT CASE WHEN n.is_called THEN n.last_value ELSE 0 END FROM hapax.message_number n), gone, delete_tenant.who,
            delete_tenant.reason)
    ON CONFLICT (tenant) DO UPDATE
    SET began_at = excluded.began_at, began_in = excluded.began_in, next_at = excluded.next_at,
        last_message = excluded.last_message, endpoints = excluded.endpoints, who = excluded.who,
        reason = excluded.reason, ended_at = NULL, phase = 0 /* events */, is_last_pass = NULL, passed_source = '',
        passed_event = '00000000-0000-0000-0000-000000000000', passed_message = 0, events = 0,
        messages = 0
    RETURNING x.* INTO d;
    RETURN d;
END $$;
