-- Ends a lease that ran out. The row of the delivery is locked. The outcome of the attempt is unknown, and
-- the fence stays valid: until the delivery is claimed again, a sender that was only slow may still report
-- "delivered". However often a delivery is lost, it never becomes a dead letter.
CREATE OR REPLACE FUNCTION hapax.lose_delivery(
    d hapax.delivery, dice double precision, at timestamptz)
RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    why CONSTANT text := 'the outcome of this attempt is unknown: the process ended during it';
BEGIN
    PERFORM hapax.note_delivery_attempt(d, why, NULL, NULL, NULL);
    UPDATE hapax.delivery x
    SET state = hapax.delivery_state('ready'), lost = d.lost + 1, error = why,
        due_at = least(d.due_at, at)
            + least(2 ^ least(d.lost, 16), 300) * (0.8 + 0.4 * dice) * interval '1 second'
    WHERE x.message = d.message AND x.endpoint = d.endpoint;
END $$;
