-- Keeps: every function of ours finds its rows by index. A session keeps the plans that it made while a
-- table was empty, and until the table is analysed those would read all of it. Runs behind each step.
DO $by_index$
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
    END LOOP;
END $by_index$
