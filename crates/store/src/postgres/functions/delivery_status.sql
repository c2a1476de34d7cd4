-- The word for a rank of hapax.delivery_rank; a message without deliveries has no rank.
CREATE OR REPLACE FUNCTION hapax.delivery_status(rank integer) RETURNS text
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN CASE rank
    WHEN 0 THEN 'dead'
    WHEN 1 THEN 'failed'
    WHEN 2 THEN 'held'
    WHEN 3 THEN 'parked'
    WHEN 4 THEN 'sending'
    WHEN 5 THEN 'waiting'
    WHEN 6 THEN 'delivered'
    WHEN 7 THEN 'cancelled'
    ELSE 'none'
END;
