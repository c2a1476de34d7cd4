-- Keeps: the guard of a copy is in the commit that its answer waits for.
INSERT INTO hapax_guard (hash, event_seq, until) VALUES (?1, ?2, ?3)
