-- Keeps: one job per event and handler, written in the event's own commit.
INSERT INTO hapax_job (event_seq, lane, state, due_at, resource, position, error, wait)
VALUES (?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT DO NOTHING
