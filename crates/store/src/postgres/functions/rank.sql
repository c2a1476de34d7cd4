-- The rank of a job's state among the statuses of its event: the event has the lowest rank of all
-- its jobs. 0 review, 1 discarded, 2 dead, 3 failed, 4 held, 5 processing, 6 received, 7 processed,
-- 8 stale. The function is not STRICT, so that PostgreSQL can inline it: a call would cost more
-- than the row.
CREATE OR REPLACE FUNCTION hapax.rank(state smallint, steps integer) RETURNS integer
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN CASE state
    WHEN hapax.job_state('review') THEN 0
    WHEN hapax.job_state('discarded') THEN 1
    WHEN hapax.job_state('dead') THEN 2
    WHEN hapax.job_state('held') THEN 4
    WHEN hapax.job_state('leased') THEN 5
    WHEN hapax.job_state('done') THEN 7
    WHEN hapax.job_state('stale') THEN 8
    ELSE CASE WHEN steps > 0 THEN 3 ELSE 6 END
END;
