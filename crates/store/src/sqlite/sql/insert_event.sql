-- Keeps: one row per accepted event, appended in commit order. The key index decided the race.
INSERT INTO hapax_event (seq, id, pair, event_id, received_at, body_hash, guard_hash, guard_until, state,
                         review)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)
