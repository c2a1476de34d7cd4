-- Keeps: a job changes as the rules decided about the row that was read, and only if that row is
-- unchanged.
UPDATE hapax_job SET state = ?4, due_at = ?5, wait = ?6, fence = ?7, run = ?8, attempt = ?9, steps = ?10, lost = ?11,
    forced = ?12, error = iif(?13, ?14, error), result = iif(?15, NULL, result),
    started_at = iif(?16, NULL, started_at), worker = iif(?16, NULL, worker),
    answer_status = NULL, answer = NULL, earlier_attempts = ?17
WHERE event_seq = ?1 AND lane = ?2 AND fence = ?3
