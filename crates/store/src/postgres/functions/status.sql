-- The status of an event by the lowest rank of its jobs (hapax.rank); an event without jobs is ignored.
CREATE OR REPLACE FUNCTION hapax.status(rank integer) RETURNS text
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN CASE rank
    WHEN 0 THEN 'review'
    WHEN 1 THEN 'discarded'
    WHEN 2 THEN 'dead'
    WHEN 3 THEN 'failed'
    WHEN 4 THEN 'held'
    WHEN 5 THEN 'processing'
    WHEN 6 THEN 'received'
    WHEN 7 THEN 'processed'
    WHEN 8 THEN 'stale'
    ELSE 'ignored'
END;
