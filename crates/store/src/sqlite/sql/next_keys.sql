-- Reads only: the next keys of both trees, in the order of their hashes. SQLite merges the two trees without sorting.
SELECT hash FROM hapax_key WHERE hash > ?1
UNION ALL
SELECT hash FROM hapax_key_young WHERE hash > ?1
ORDER BY hash LIMIT ?2
