-- Keeps: counting what waits for a decision reads the index of those alone, and their rows.
SELECT w.source, count(*)
FROM (SELECT e.source FROM hapax.event e WHERE e.state <> 0 AND e.state = 1 LIMIT $1) w
GROUP BY w.source ORDER BY w.source
