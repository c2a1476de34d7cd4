-- Keeps: the record that an earlier attempt may have done its work. Nothing was done under this
-- fence, so the key is free. A key that was reserved before returns to the state that its last
-- attempt left, under a fence that no attempt holds.
CREATE OR REPLACE FUNCTION hapax.abandon(scope text, key text, fence bigint) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
#variable_conflict use_column
BEGIN
    UPDATE hapax.reservation x
    SET attempt = x.attempt - 1, leased_until = '-infinity', fence = hapax.next_fence(x.fence),
        -- The row of a new key is deleted at the next pruning; until then a new fence is larger
        -- than this one.
        expires_at = CASE WHEN x.attempt = 1 THEN '-infinity' ELSE x.expires_at END,
        owner = CASE WHEN x.attempt = 1 THEN NULL ELSE x.owner END
    WHERE x.scope = abandon.scope AND x.key = abandon.key AND x.fence = abandon.fence
      AND x.status IS NULL;
END $$;
