-- Keeps: done once per fence, in the transaction of the effects.
UPDATE hapax_job SET state = 2 /* done */, due_at = ?4, result = ?5, error = NULL, forced = 0,
    answer_status = ?6, answer = ?7
WHERE event_seq = ?1 AND lane = ?2 AND fence = ?3
  AND state NOT IN (2 /* done */, 3 /* stale */, 8 /* discarded */)
