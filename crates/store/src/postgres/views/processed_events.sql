CREATE OR REPLACE VIEW hapax.processed_events AS
SELECT e.id,
       hapax.escaped_text(e.event_id) AS event_id,
       e.tenant,
       e.source,
       hapax.escaped_text(e.event_type) AS event_type,
       e.id::text AS idempotency_key,
       e.received_at,
       CASE WHEN s.status IN ('processed', 'stale') THEN j.ended_at END AS processed_at,
       s.status IN ('processed', 'stale') AS processed,
       s.status,
       j.result,
       hapax.escaped_text(b.body) AS payload
FROM hapax.event e
JOIN hapax.body b ON b.id = e.id
LEFT JOIN LATERAL (
    SELECT min(hapax.rank(j.state, j.steps)) AS rank, max(j.due_at) AS ended_at,
           (array_agg(j.result ORDER BY j.job) FILTER (WHERE j.result IS NOT NULL))[1] AS result
    FROM hapax.job j WHERE j.job >= e.id AND j.job <= hapax.last_job(e.id)
) j ON true
CROSS JOIN LATERAL (
    SELECT CASE WHEN e.state = hapax.event_state('review') THEN 'review'
                WHEN e.state = hapax.event_state('discarded') THEN 'discarded'
                ELSE hapax.status(j.rank)
           END AS status
) s;
