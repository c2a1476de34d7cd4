-- Keeps: one event per key. The constraint backs up the writer, which has just searched both trees.
INSERT INTO hapax_key_young (hash, seq) VALUES (?1, ?2)
