-- Whether a job may still be settled under this fence.
CREATE OR REPLACE FUNCTION hapax.is_held(of_job uuid, of_fence bigint) RETURNS boolean
LANGUAGE sql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
    SELECT EXISTS (SELECT FROM hapax.job x
                   WHERE x.job = of_job AND x.fence = of_fence AND NOT hapax.is_over(x.state));
$$;
