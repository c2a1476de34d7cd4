-- Keeps: a key is in one of the two trees.
SELECT seq FROM hapax_key_young WHERE hash = ?1
UNION ALL
SELECT seq FROM hapax_key WHERE hash = ?1 LIMIT 1
