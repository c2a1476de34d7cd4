-- Keeps: an event and its jobs are in the same commit.
), jobs AS (
    -- A missing lane leaves no due time, and the whole statement fails: a job that no claim would find
    -- must not be written.
    INSERT INTO hapax.job (job, event, handler, lane, state, due_at, resource, position, error)
    SELECT hapax.job_id(a.id, j.lane), a.id, j.handler, j.lane, j.state,
           hapax.first_due(coalesce($2::timestamptz, statement_timestamp()), (
               SELECT h.retry FROM hapax.lane l JOIN hapax.handler h ON h.handler = l.handler
               WHERE l.lane = j.lane AND l.handler = j.handler AND l.tenant = a.tenant), j.state),
           j.resource, j.position, j.error
    FROM unnest($3::hapax.promised[]) AS j
    JOIN arrived a ON a.n = j.n
    JOIN accepted ON accepted.id = a.id
