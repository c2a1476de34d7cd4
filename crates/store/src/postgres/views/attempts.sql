CREATE OR REPLACE VIEW hapax.attempts AS
SELECT hapax.escaped_text(e.event_id) AS event_id, h.source, h.name AS handler, a.run, a.attempt,
       a.outcome, a.error, a.worker, a.started_at, a.ended_at, a.answer_status, a.answer
FROM hapax.attempt a JOIN hapax.job j ON j.job = a.job JOIN hapax.event e ON e.id = j.event
     JOIN hapax.handler h ON h.handler = j.handler
UNION ALL
SELECT hapax.escaped_text(e.event_id), h.source, h.name, j.run, j.attempt, 'done', NULL, j.worker,
       j.started_at, j.due_at, j.answer_status, j.answer
FROM hapax.job j JOIN hapax.event e ON e.id = j.event
     JOIN hapax.handler h ON h.handler = j.handler
WHERE j.state = hapax.job_state('done');
