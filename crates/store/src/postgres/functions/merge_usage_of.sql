-- Keeps: the usage of an owner. Merges its unlocked rows into one row with the same sums.
CREATE OR REPLACE FUNCTION hapax.merge_usage_of(owner text) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
#variable_conflict use_column
DECLARE
    held record;
    came integer;
BEGIN
    SELECT array_agg(h.slot) AS slots, sum(h.keys)::bigint AS keys, sum(h.bytes)::bigint AS bytes,
           sum(h.callers)::bigint AS callers
    INTO held
    FROM (SELECT u.* FROM hapax.key_usage u WHERE u.owner = merge_usage_of.owner AND u.slot <> 0
          ORDER BY u.slot FOR UPDATE SKIP LOCKED) h;
    IF held.slots IS NULL THEN
        RETURN;
    END IF;
    DELETE FROM hapax.key_usage u WHERE u.owner = merge_usage_of.owner AND u.slot = ANY (held.slots);
    came := hapax.count_usage(merge_usage_of.owner, held.keys, held.bytes, held.callers);
    -- Row 0 of the owner was missing, or is no longer needed. An API itself is not a caller.
    IF came <> 0 AND position('/' IN merge_usage_of.owner) > 0 THEN
        PERFORM hapax.count_usage(split_part(merge_usage_of.owner, '/', 1), 0, 0, came);
    END IF;
END $$;
