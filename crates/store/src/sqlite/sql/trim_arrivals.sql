-- Keeps: no more than the newest few plain copies of one event; conflicts stay.
DELETE FROM hapax_arrival WHERE event_seq = ?1 AND conflict = 0 AND received_at < (
    SELECT received_at FROM hapax_arrival WHERE event_seq = ?1 AND conflict = 0
    ORDER BY received_at DESC LIMIT 1 OFFSET ?2)
