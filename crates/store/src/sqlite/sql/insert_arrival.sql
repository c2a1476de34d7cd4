-- Keeps: an arrival of an event that has its body, once. If the event was pruned, its arrivals are only counted:
-- a row would keep a body or an address for as long as the key.
INSERT OR IGNORE INTO hapax_arrival (event_seq, received_at, request_id, conflict, remote, secret, signed_at, body)
SELECT ?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8 WHERE EXISTS (SELECT 1 FROM hapax_event WHERE seq = ?1 AND pruned < 0)
