-- The rank of a job's state among the statuses of its event: the event has the lowest rank of all
-- its jobs. 0 review, 1 discarded, 2 dead, 3 failed, 4 held, 5 processing, 6 received, 7 processed,
-- 8 stale. Not STRICT, so that PostgreSQL can inline it: a call would cost more than the row.
CREATE OR REPLACE FUNCTION hapax.rank(state smallint, steps integer) RETURNS integer
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN CASE state
    WHEN 7 THEN 0 WHEN 8 THEN 1 WHEN 4 THEN 2 WHEN 5 THEN 4
    WHEN 1 THEN 5 WHEN 2 THEN 7 WHEN 3 THEN 8
    ELSE CASE WHEN steps > 0 THEN 3 ELSE 6 END
END;

-- The views call it, and a role that may read a view calls the functions in it. It reads no table.
GRANT EXECUTE ON FUNCTION hapax.rank(smallint, integer) TO PUBLIC;
