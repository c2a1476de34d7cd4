-- Keeps: an attempt is counted, and the old right voided, before the work begins.
UPDATE hapax_job SET state = 1 /* leased */, due_at = ?3, fence = ?4, attempt = ?5, started_at = ?6,
    worker = ?7, exclusive = ?8, wait = ?9
WHERE event_seq = ?1 AND lane = ?2
