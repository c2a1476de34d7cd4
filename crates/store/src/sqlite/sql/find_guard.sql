-- Keeps: signed content that came with a copy is known like that of the event's first arrival.
SELECT event_seq FROM hapax_guard WHERE hash = ?1
