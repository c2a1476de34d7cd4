-- Keeps: attempts are counted, and old rights voided, before the work begins. All jobs of ?2, a JSON array
-- of event numbers, are ready and keep no order.
UPDATE hapax_job SET state = 1 /* leased */, due_at = ?3, fence = fence + 1, attempt = attempt + 1, started_at = ?4,
    worker = ?5, exclusive = 0, wait = ?6
WHERE lane = ?1 AND event_seq IN (SELECT value FROM json_each(?2))
