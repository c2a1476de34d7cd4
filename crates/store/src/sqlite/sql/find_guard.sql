-- Keeps: signed content of a copy is recognised like that of the event's first arrival.
SELECT event_seq FROM hapax_guard WHERE hash = ?1
