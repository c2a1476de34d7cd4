-- Keeps: every key that is not in the tree yet is in memory before the first event is accepted.
SELECT e.seq, p.tenant, p.source, e.event_id, e.guard_hash
FROM hapax_event e JOIN hapax_pair p ON p.pair = e.pair
WHERE e.seq > ?1 ORDER BY e.seq
