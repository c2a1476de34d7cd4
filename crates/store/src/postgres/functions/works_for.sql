-- Makes the messages that this transaction publishes from now on part of this job's event.
CREATE OR REPLACE FUNCTION hapax.works_for(of_job uuid) RETURNS void
LANGUAGE sql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
    SELECT set_config('hapax.job', of_job || ' ' || hapax.seal_of(of_job), true);
$$;
