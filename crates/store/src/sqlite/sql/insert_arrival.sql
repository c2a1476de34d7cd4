-- Keeps: an arrival of an event that exists, once. If the event was pruned while its copy waited, the row
-- would never be deleted.
INSERT OR IGNORE INTO hapax_arrival (event_seq, received_at, request_id, conflict, remote, secret, signed_at, body)
SELECT ?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8 WHERE EXISTS (SELECT 1 FROM hapax_event WHERE seq = ?1)
