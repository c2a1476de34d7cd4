-- Deletes body, jobs and history of these events (sorted) as one range, which costs a fraction of deleting
-- them one by one. Returns false and deletes nothing if another event lies in the range: a node whose clock
-- is behind, or that was paused, may have written that event since. Bodies are deleted last, and an event's
-- jobs are committed with its body. So such an event is always found.
CREATE OR REPLACE FUNCTION hapax.strip_run(events uuid[]) RETURNS boolean
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    first CONSTANT uuid := events[1];
    last CONSTANT uuid := hapax.last_job(events[cardinality(events)]);
    bodies integer;
BEGIN
    DELETE FROM hapax.job j WHERE j.job >= first AND j.job <= last;
    DELETE FROM hapax.attempt a WHERE a.job >= first AND a.job <= last;
    DELETE FROM hapax.arrival a WHERE a.event >= first AND a.event <= last;
    DELETE FROM hapax.copy c WHERE c.event >= first AND c.event <= last;
    DELETE FROM hapax.action a WHERE a.event >= first AND a.event <= last;
    DELETE FROM hapax.search_value v WHERE v.event >= first AND v.event <= last;
    DELETE FROM hapax.body b WHERE b.id >= first AND b.id <= last;
    GET DIAGNOSTICS bodies = ROW_COUNT;
    IF bodies <> cardinality(events) THEN
        RAISE EXCEPTION 'another event is in the range' USING ERRCODE = 'XH002';
    END IF;
    RETURN true;
EXCEPTION WHEN SQLSTATE 'XH002' THEN
    RETURN false;
END $$;
