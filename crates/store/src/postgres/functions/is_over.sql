-- Whether no work is left in a job of this state: it is done, overtaken by a newer version, or given up
-- by an operator. The function is not STRICT, so that PostgreSQL can inline it.
CREATE OR REPLACE FUNCTION hapax.is_over(state smallint) RETURNS boolean
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN state IN (
    hapax.job_state('done'), hapax.job_state('stale'), hapax.job_state('discarded'));
