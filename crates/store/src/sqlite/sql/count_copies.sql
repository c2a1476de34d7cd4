-- Keeps: how often each event arrived after the first time without a row of its own, and its conflicts.
INSERT INTO hapax_copy (event_seq, only_counted, conflicts)
SELECT ?1, ?2, ?3 WHERE EXISTS (SELECT 1 FROM hapax_event WHERE seq = ?1)
ON CONFLICT (event_seq) DO UPDATE SET only_counted = only_counted + excluded.only_counted,
    conflicts = conflicts + excluded.conflicts
