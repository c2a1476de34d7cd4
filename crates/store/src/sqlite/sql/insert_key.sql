-- Keeps: one event per key, behind the writer that has just looked for it in both trees.
INSERT INTO hapax_key_young (hash, seq) VALUES (?1, ?2)
