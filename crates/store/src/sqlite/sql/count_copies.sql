-- Keeps: how often each event arrived after the first time.
INSERT INTO hapax_copy (event_seq, copies, conflicts, last_at) VALUES (?1, ?2, ?3, ?4)
ON CONFLICT (event_seq) DO UPDATE SET copies = copies + excluded.copies,
    conflicts = conflicts + excluded.conflicts, last_at = max(last_at, excluded.last_at)
