-- Keeps: one row per accepted event, appended in commit order. The key index decided the race.
INSERT INTO hapax_event (seq, id, pair, event_id, event_type, occurred_at, received_at, body_hash,
                         guard_hash, guard_until, state, review, request_id, remote, secret, signed_at, headers, body)
VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11, ?12, ?13, ?14, ?15, ?16, ?17, ?18)
