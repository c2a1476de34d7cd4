-- Keeps: an event leaves review once, by an on-time copy or by a person.
UPDATE hapax_event SET state = 0 /* open */ WHERE seq = ?1 AND state = 1 /* review */
