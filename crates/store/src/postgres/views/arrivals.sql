CREATE OR REPLACE VIEW hapax.arrivals AS
SELECT e.id, hapax.escaped_text(e.event_id) AS event_id,
       CASE WHEN e.review <> hapax.review_reason('none') THEN 'review' ELSE 'accepted' END AS decision,
       e.received_at, e.remote
FROM hapax.event e
UNION ALL
SELECT e.id, hapax.escaped_text(e.event_id),
       CASE WHEN a.conflict THEN 'conflict' ELSE 'duplicate' END, a.received_at, a.remote
FROM hapax.arrival a JOIN hapax.event e ON e.id = a.event;
