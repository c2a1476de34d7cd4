-- How long a commit may take after its statement read the time. A claim that has seen all jobs due
-- before a time starts the next time from this much earlier.
CREATE OR REPLACE FUNCTION hapax.commit_slack() RETURNS interval
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN interval '200 ms';
