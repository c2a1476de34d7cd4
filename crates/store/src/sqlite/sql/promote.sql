-- Keeps: an event leaves review once, because of an on-time copy or an operator.
UPDATE hapax_event SET state = 0 /* open */ WHERE seq = ?1 AND state = 1 /* review */
