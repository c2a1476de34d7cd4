-- When a new job is due: after the first wait of its schedule, ±20 %, so that jobs that arrived
-- together are not due together. The time of a job that is dead on arrival is its arrival.
CREATE OR REPLACE FUNCTION hapax.first_due(at timestamptz, retry bigint[], state smallint) RETURNS timestamptz
LANGUAGE sql VOLATILE PARALLEL SAFE
RETURN at + retry[1] * CASE state
        WHEN hapax.job_state('dead') THEN 0 ELSE 0.8 + 0.4 * pg_catalog.random() END
    * interval '1 microsecond';
