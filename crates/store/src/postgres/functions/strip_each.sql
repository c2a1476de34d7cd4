-- Deletes body, jobs and history of these events one by one, because other events lie between them.
CREATE OR REPLACE FUNCTION hapax.strip_each(events uuid[]) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    DELETE FROM hapax.job j USING unnest(events) AS r (id)
    WHERE j.job >= r.id AND j.job <= hapax.last_job(r.id);
    DELETE FROM hapax.attempt a USING unnest(events) AS r (id)
    WHERE a.job >= r.id AND a.job <= hapax.last_job(r.id);
    DELETE FROM hapax.arrival a WHERE a.event = ANY (events);
    DELETE FROM hapax.copy c WHERE c.event = ANY (events);
    DELETE FROM hapax.action a WHERE a.event = ANY (events);
    DELETE FROM hapax.search_value v WHERE v.event = ANY (events);
    DELETE FROM hapax.body b WHERE b.id = ANY (events);
END $$;
