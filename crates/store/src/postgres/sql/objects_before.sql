-- Runs in the transaction of each migration step and of each new version of the functions, before them. Records which
-- objects of Hapax exist: their rights are the operator's. See new_rights.sql.
DO $before$
BEGIN
    PERFORM set_config('hapax.objects_before', coalesce((
        SELECT string_agg(o.object, ' ') FROM (
            SELECT 'schema_' || n.oid AS object FROM pg_catalog.pg_namespace n WHERE n.nspname = 'hapax'
            UNION ALL SELECT 'relation_' || c.oid FROM pg_catalog.pg_class c
            WHERE c.relnamespace = to_regnamespace('hapax')
            UNION ALL SELECT 'function_' || p.oid FROM pg_catalog.pg_proc p
            WHERE p.pronamespace = to_regnamespace('hapax')) o), ''), true);
END $before$;
