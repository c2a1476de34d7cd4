-- Runs after the functions of each new version, and after after_functions.sql. The views call these functions, so a
-- role that reads a view must be able to execute them. These functions read no table.
GRANT EXECUTE ON FUNCTION
    hapax.delivery_id(timestamptz, uuid, bigint, integer),
    hapax.delivery_rank(smallint, integer, boolean, boolean),
    hapax.delivery_state(text),
    hapax.delivery_status(integer),
    hapax.escaped_text(bytea),
    hapax.event_state(text),
    hapax.job_state(text),
    hapax.last_job(uuid),
    hapax.rank(smallint, integer),
    hapax.review_reason(text),
    hapax.status(integer)
TO PUBLIC;
