CREATE OR REPLACE VIEW hapax.deliveries AS
SELECT hapax.delivery_id(m.created_at, m.fingerprint, d.message, d.endpoint) AS id,
       m.id AS message,
       e.id::text AS endpoint,
       hapax.delivery_status(
           hapax.delivery_rank(d.state, d.steps, e.disabled_at IS NOT NULL OR e.failing IS NOT NULL,
                               e.deleted_at IS NOT NULL)) AS status,
       d.attempt,
       m.created_at,
       CASE WHEN d.state = hapax.delivery_state('delivered') THEN d.due_at END AS delivered_at
FROM hapax.delivery d
JOIN hapax.message m ON m.message = d.message
JOIN hapax.endpoint e ON e.endpoint = d.endpoint;
