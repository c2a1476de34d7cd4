-- Keeps: a sequence without a first number begins with the number that is claimed first. The first
-- number is committed with the claim: if it fails, no other number becomes the first.
CREATE OR REPLACE FUNCTION hapax.begin_sequence(h hapax.handler, of_lane integer, of_resource text, first bigint)
RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    IF h.policy = hapax.order_policy('sequence') AND h.start_at IS NULL
        AND first > -9223372036854775808
    THEN
        UPDATE hapax.mark m SET position = first - 1
        WHERE m.lane = of_lane AND m.resource = of_resource AND m.position IS NULL;
    END IF;
END $$;
