-- Keeps: a partition for the bodies of every day. A partition is created beside the table and then
-- attached, which blocks neither readers nor writers. Two nodes may ask for the same day.
CREATE OR REPLACE FUNCTION hapax.make_partition(day date) RETURNS boolean
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    name text := 'body_' || to_char(day, 'YYYYMMDD');
    ms_from bigint := extract(epoch FROM day::timestamp)::bigint * 1000;
    ms_to bigint := ms_from + 86400000;
    granted record;
BEGIN
    PERFORM pg_advisory_xact_lock(x'6861706178000002'::bigint);
    IF to_regclass('hapax.' || name) IS NOT NULL THEN
        RETURN false;
    END IF;
    EXECUTE format('CREATE TABLE hapax.%I (LIKE hapax.body INCLUDING ALL)', name);
    -- ALTER DEFAULT PRIVILEGES may have given rights on the partition that no role has on hapax.body.
    FOR granted IN
        SELECT a.privilege_type AS privilege,
            CASE a.grantee WHEN 0 THEN 'PUBLIC' ELSE quote_ident(pg_get_userbyid(a.grantee)) END AS role
        FROM pg_class c CROSS JOIN LATERAL aclexplode(c.relacl) a
        WHERE c.oid = to_regclass('hapax.' || name) AND a.grantee <> c.relowner
          AND NOT EXISTS (
              SELECT FROM pg_class p CROSS JOIN LATERAL aclexplode(p.relacl) b
              WHERE p.oid = 'hapax.body'::regclass AND b.grantee = a.grantee
                AND b.privilege_type = a.privilege_type)
    LOOP
        EXECUTE format('REVOKE %s ON TABLE hapax.%I FROM %s', granted.privilege, name, granted.role);
    END LOOP;
    -- Rows are found only by their id, so the planner needs no statistics.
    EXECUTE format('ALTER TABLE hapax.%I ALTER id SET STATISTICS 0, ALTER headers SET STATISTICS 0,
                        ALTER body SET STATISTICS 0', name);
    EXECUTE format('ALTER TABLE hapax.body ATTACH PARTITION hapax.%I FOR VALUES FROM (%L) TO (%L)',
        name, rpad(lpad(to_hex(ms_from), 12, '0'), 32, '0')::uuid,
        rpad(lpad(to_hex(ms_to), 12, '0'), 32, '0')::uuid);
    RETURN true;
END $$;
