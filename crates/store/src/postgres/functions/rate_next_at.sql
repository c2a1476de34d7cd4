-- When the next attempt may begin, given the time until which earlier attempts are paid for, as
-- hapax_core::rate_limit::next_at. Claims may run ahead by 50 ms, so that a node that claims a
-- little late still reaches the limit.
CREATE OR REPLACE FUNCTION hapax.rate_next_at(paid_until timestamptz) RETURNS timestamptz
LANGUAGE sql STABLE PARALLEL SAFE
RETURN paid_until - interval '50 milliseconds';
