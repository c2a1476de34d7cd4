-- Keeps: one change of a tenant's endpoints at a time, until the commit. So the number of endpoints and their
-- uids stay as the transaction has read them. Publishing and claiming do not wait for this lock.
CREATE OR REPLACE FUNCTION hapax.endpoint_lock(of_tenant text) RETURNS void
LANGUAGE sql SET search_path = pg_catalog, pg_temp AS $$
    SELECT pg_advisory_xact_lock(hashtextextended(of_tenant, x'6861706178000003'::bigint));
$$;
