-- The advisory lock between replays, which share it, and retention, which excludes them for a slice.
CREATE OR REPLACE FUNCTION hapax.replay_lock() RETURNS bigint
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN x'6861706178000005'::bigint;
