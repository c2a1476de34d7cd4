-- Keeps: no more than the newest few plain copies of one event are rows. The rows are adjacent.
SELECT count(*) FROM hapax_arrival WHERE event_seq = ?1 AND conflict = 0
