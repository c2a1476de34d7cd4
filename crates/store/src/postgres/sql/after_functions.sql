-- Runs in the transaction of each migration step and of each new version of the functions, after them.

-- Keeps: every function of Hapax finds its rows by index. A session keeps the plans that it made while a
-- table was empty. Until the table is analysed, such plans would read the whole table. A plan that cannot
-- avoid a forbidden scan has an enormous cost, so PostgreSQL would JIT-compile the statement each time.
-- Compiling takes longer than any statement of Hapax runs.
DO $after$
DECLARE
    f regprocedure;
BEGIN
    FOR f IN
        SELECT p.oid::regprocedure FROM pg_catalog.pg_proc p
        WHERE p.pronamespace = 'hapax'::regnamespace AND p.prokind = 'f' AND p.proconfig IS NOT NULL
    LOOP
        EXECUTE format('ALTER FUNCTION %s SET enable_seqscan = off', f);
        EXECUTE format('ALTER FUNCTION %s SET enable_hashjoin = off', f);
        EXECUTE format('ALTER FUNCTION %s SET enable_mergejoin = off', f);
        EXECUTE format('ALTER FUNCTION %s SET jit = off', f);
    END LOOP;
END $after$;

-- Keeps: a handler cannot write to a table of Hapax (hapax.refuse_handler), and every reservation is
-- counted for its caller. A trigger is created if it is missing: replacing one would wait for all
-- writers.
DO $after$
DECLARE
    wanted record;
BEGIN
    FOR wanted IN
        SELECT t.name, t.owner, t.sql FROM (
            SELECT 'refuse_handler' AS name, c.relname::text AS owner,
                'BEFORE INSERT OR UPDATE OR DELETE OR TRUNCATE ON hapax.%I FOR EACH STATEMENT '
                'WHEN (current_setting(''hapax.in_handler'', true) = ''on'')' AS sql
            FROM pg_catalog.pg_class c
            WHERE c.relnamespace = 'hapax'::regnamespace AND c.relkind IN ('r', 'p')
              AND NOT c.relispartition AND c.relname !~ '^body_[0-9]+$'
            UNION ALL
            VALUES
                ('reservation_came', 'reservation',
                 'AFTER INSERT ON hapax.%I REFERENCING NEW TABLE AS came FOR EACH STATEMENT'),
                ('reservation_changed', 'reservation',
                 'AFTER UPDATE ON hapax.%I REFERENCING OLD TABLE AS gone NEW TABLE AS came '
                 'FOR EACH STATEMENT'),
                ('reservation_went', 'reservation',
                 'AFTER DELETE ON hapax.%I REFERENCING OLD TABLE AS gone FOR EACH STATEMENT')
        ) t
        WHERE to_regprocedure('hapax.' || t.name || '()') IS NOT NULL
          AND NOT EXISTS (
              SELECT FROM pg_catalog.pg_trigger g
              WHERE g.tgname = t.name AND g.tgrelid = to_regclass('hapax.' || t.owner))
    LOOP
        EXECUTE format('CREATE TRIGGER %I ' || wanted.sql || ' EXECUTE FUNCTION hapax.%I()',
                       wanted.name, wanted.owner, wanted.name);
    END LOOP;
END $after$;
