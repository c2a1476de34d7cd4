-- Keeps: one event per key, in addition to the writer, which has just searched both trees.
INSERT INTO hapax_key_young (hash, seq) VALUES (?1, ?2)
