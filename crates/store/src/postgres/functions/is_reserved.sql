-- Whether a key still waits for the answer of this fence.
CREATE OR REPLACE FUNCTION hapax.is_reserved(of_scope text, of_key text, of_fence bigint) RETURNS boolean
LANGUAGE sql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
    SELECT EXISTS (SELECT FROM hapax.reservation x
                   WHERE x.scope = of_scope AND x.key = of_key AND x.fence = of_fence
                     AND x.status IS NULL);
$$;
