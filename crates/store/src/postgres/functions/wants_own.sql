-- Whether an endpoint of the tenant hapax wants messages of this type.
CREATE OR REPLACE FUNCTION hapax.wants_own(of_type text) RETURNS boolean
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp AS $$
    SELECT EXISTS (
        SELECT FROM hapax.endpoint e
        WHERE e.tenant = 'hapax' AND e.deleted_at IS NULL
          AND hapax.wants_message(e.types, e.api_version, of_type, NULL));
$$;
