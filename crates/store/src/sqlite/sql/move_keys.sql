-- Keeps: a key is in one of the two trees. Keys that are copied here are deleted in the same
-- transaction. A key that is there already makes the two numbers differ, which stops the store.
INSERT INTO hapax_key (hash, seq)
SELECT hash, seq FROM hapax_key_young WHERE hash >= ?1 AND hash <= ?2 ORDER BY hash
ON CONFLICT DO NOTHING
