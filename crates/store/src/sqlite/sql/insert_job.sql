-- Keeps: one job per event and handler, written in the event's own commit.
INSERT INTO hapax_job (event_seq, lane, state, due_at, resource, position, error, wait)
VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8) ON CONFLICT DO NOTHING
