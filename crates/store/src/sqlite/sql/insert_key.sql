-- Keeps: one event per key. Merging again what is merged already is skipped and then checked.
INSERT INTO hapax_key (hash, seq) VALUES (?1, ?2) ON CONFLICT DO NOTHING
