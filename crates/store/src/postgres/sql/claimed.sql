-- Reads only: returns a claim as it is now, if the job still has its fence.
SELECT j.state, h.source, h.name, j.job, j.fence, j.attempt, j.steps, j.run, j.due_at AS leased_until,
    j.lost > 0 AND h.workplace = hapax.workplace('node') AS alone, j.event, j.lane, e.tenant, e.event_id,
    e.event_type, e.occurred_at, e.received_at, j.resource, j.position AS place, j.forced, b.headers, b.body, e.body_hash
FROM hapax.job j
JOIN hapax.handler h ON h.handler = j.handler
JOIN hapax.event e ON e.id = j.event
JOIN hapax.body b ON b.id = j.event
WHERE j.job = $1 AND j.fence = $2
