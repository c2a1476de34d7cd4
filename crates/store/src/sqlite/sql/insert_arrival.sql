-- Keeps: the newest few arrivals of an event in full.
INSERT OR IGNORE INTO hapax_arrival (event_seq, received_at, request_id, conflict, remote, secret, signed_at, body)
VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8)
