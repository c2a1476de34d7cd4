-- Keeps: only a role with an explicit grant reaches an object of Hapax. PostgreSQL lets every role execute a new
-- function, and ALTER DEFAULT PRIVILEGES may give any right on any new object to any role. So a new object loses all
-- rights but its owner's. An object that existed before (objects_before.sql) keeps its rights: they are the operator's.
DO $rights$
DECLARE
    before CONSTANT text[] := string_to_array(current_setting('hapax.objects_before'), ' ');
    granted record;
BEGIN
    FOR granted IN
        SELECT DISTINCT o.object,
            CASE a.grantee WHEN 0 THEN 'PUBLIC' ELSE quote_ident(pg_get_userbyid(a.grantee)) END AS role
        FROM (
            SELECT 'schema_' || n.oid AS id, 'SCHEMA hapax' AS object, n.nspowner AS owner, n.nspacl AS acl
            FROM pg_catalog.pg_namespace n WHERE n.nspname = 'hapax'
            UNION ALL
            SELECT 'relation_' || c.oid,
                CASE c.relkind WHEN 'S' THEN 'SEQUENCE ' ELSE 'TABLE ' END || c.oid::regclass, c.relowner, c.relacl
            FROM pg_catalog.pg_class c
            WHERE c.relnamespace = 'hapax'::regnamespace AND c.relkind IN ('r', 'p', 'v', 'S')
            UNION ALL
            SELECT 'function_' || p.oid, 'FUNCTION ' || p.oid::regprocedure, p.proowner,
                coalesce(p.proacl, acldefault('f', p.proowner))
            FROM pg_catalog.pg_proc p WHERE p.pronamespace = 'hapax'::regnamespace) o
        CROSS JOIN LATERAL aclexplode(o.acl) a
        WHERE o.id <> ALL (before) AND a.grantee <> o.owner
    LOOP
        EXECUTE format('REVOKE ALL ON %s FROM %s', granted.object, granted.role);
    END LOOP;
END $rights$;
