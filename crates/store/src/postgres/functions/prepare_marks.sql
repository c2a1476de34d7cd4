-- Keeps: the transaction of the work finds the marks that it will lock, and a sequence without a first
-- number begins with the number that is claimed first. The function is called for jobs whose order is decided
-- later.
CREATE OR REPLACE FUNCTION hapax.prepare_marks(h hapax.handler, jobs uuid[]) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    PERFORM hapax.try_mark(r.lane, r.resource)
    FROM (SELECT DISTINCT x.lane, x.resource FROM hapax.job x
          WHERE x.job = ANY (jobs) AND x.resource IS NOT NULL) r;
    IF h.policy = hapax.order_policy('sequence') AND h.start_at IS NULL THEN
        PERFORM hapax.begin_sequence(h, x.lane, x.resource, x.position)
        FROM unnest(jobs) WITH ORDINALITY t (job, n) JOIN hapax.job x ON x.job = t.job
        WHERE x.resource IS NOT NULL ORDER BY t.n;
    END IF;
END $$;
