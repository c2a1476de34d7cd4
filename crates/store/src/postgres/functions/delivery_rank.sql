-- The place of a delivery's status in hapax_core::delivery::DeliveryStatus, the most urgent first. The
-- rank of a message is the smallest of its deliveries. is_held: the endpoint is disabled, or its
-- circuit is not closed.
CREATE OR REPLACE FUNCTION hapax.delivery_rank(
    state smallint, steps integer, is_held boolean, is_deleted boolean)
RETURNS integer
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN CASE
    WHEN state = hapax.delivery_state('dead') THEN 0
    WHEN state = hapax.delivery_state('leased') THEN 4
    WHEN state = hapax.delivery_state('delivered') THEN 6
    WHEN state = hapax.delivery_state('cancelled') THEN 7
    WHEN is_deleted THEN 7
    WHEN is_held THEN 2
    WHEN state = hapax.delivery_state('parked') THEN 3
    WHEN steps > 0 THEN 1
    ELSE 5
END;
