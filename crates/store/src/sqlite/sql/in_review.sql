-- Keeps: counting events in review reads only the index of those events.
SELECT p.source, count(*)
FROM (SELECT pair FROM hapax_event INDEXED BY hapax_event_review
      WHERE state <> 0 /* open */ AND state = 1 /* review */ LIMIT ?1) w
JOIN hapax_pair p ON p.pair = w.pair
GROUP BY p.source ORDER BY p.source
