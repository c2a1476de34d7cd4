-- Publishes the change of an endpoint between active, failing and disabled, if there is one, as
-- hapax_core::own_messages decides. `before`: the row before the change, whose state row is locked.
CREATE OR REPLACE FUNCTION hapax.publish_standing(before hapax.endpoint, at timestamptz) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    e hapax.endpoint;
    kind text;
BEGIN
    SELECT * INTO e FROM hapax.endpoint x WHERE x.endpoint = before.endpoint;
    IF e.tenant = 'hapax' OR e.deleted_at IS NOT NULL THEN
        RETURN;
    END IF;
    kind := CASE
        WHEN before.disabled_at IS NULL AND e.disabled_at IS NOT NULL THEN 'hapax.endpoint.disabled'
        WHEN e.disabled_at IS NOT NULL THEN NULL
        WHEN e.failing IS NULL AND (before.failing IS NOT NULL OR before.disabled_at IS NOT NULL)
        THEN 'hapax.endpoint.recovered'
        WHEN e.failing IS NOT NULL AND before.failing IS NULL AND before.disabled_at IS NULL
        THEN 'hapax.endpoint.failing' END;
    IF kind IS NOT NULL THEN
        PERFORM hapax.publish_own(
            kind,
            jsonb_strip_nulls(jsonb_build_object(
                'endpoint', e.id, 'tenant', e.tenant,
                'reason', coalesce(e.disabled_reason, e.failing)))::text,
            e.id::text, at);
    END IF;
END $$;
