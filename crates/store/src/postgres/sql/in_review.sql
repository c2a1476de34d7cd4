-- Keeps: counting what waits for a decision reads the index of those alone, and their rows.
SELECT w.source, count(*)
FROM (SELECT e.source FROM hapax.event e
      WHERE e.state <> hapax.event_state('open') AND e.state = hapax.event_state('review') LIMIT $1) w
GROUP BY w.source ORDER BY w.source
