-- Keeps: the content of an event, in the event's own commit.
INSERT INTO hapax_body (seq, event_type, occurred_at, request_id, remote, secret, signed_at, headers, body)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)
