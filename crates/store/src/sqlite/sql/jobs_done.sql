-- Keeps: done once per fence, in the transaction of the effects. ?2 is a JSON array of event numbers.
-- The plus keeps SQLite from reading all leased jobs by their index.
UPDATE hapax_job SET state = 2 /* done */, due_at = ?4, result = NULL, error = NULL, forced = 0,
    answer_status = NULL, answer = NULL
WHERE lane = ?1 AND event_seq IN (SELECT value FROM json_each(?2)) AND fence = ?3 AND +state = 1 /* leased */
