-- Keeps: counting events in review reads only the index of those events, and their rows.
SELECT w.source, count(*)
FROM (SELECT e.source FROM hapax.event e
      WHERE e.state <> hapax.event_state('open') AND e.state = hapax.event_state('review') LIMIT $1) w
GROUP BY w.source ORDER BY w.source
