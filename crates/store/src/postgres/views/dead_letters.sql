CREATE OR REPLACE VIEW hapax.dead_letters AS
SELECT hapax.escaped_text(e.event_id) AS event_id, e.tenant, e.source, h.name AS handler,
       hapax.escaped_text(e.event_type) AS event_type, j.run, j.attempt, j.error, j.due_at AS buried_at
FROM hapax.job j JOIN hapax.event e ON e.id = j.event
     JOIN hapax.handler h ON h.handler = j.handler
WHERE j.state = hapax.job_state('dead');
