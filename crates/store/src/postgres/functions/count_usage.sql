-- Adds to an unlocked row of the owner's usage. Returns 1 if the owner is new, -1 if its last row
-- was deleted, otherwise 0.
CREATE OR REPLACE FUNCTION hapax.count_usage(owner text, keys bigint, bytes bigint, callers bigint)
RETURNS integer
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
#variable_conflict use_column
DECLARE
    free bigint;
    is_zero boolean;
BEGIN
    -- Under a stricter isolation a row that another transaction has changed cannot be written.
    IF current_setting('transaction_isolation') = 'read committed' THEN
        SELECT u.slot INTO free FROM hapax.key_usage u WHERE u.owner = count_usage.owner
        ORDER BY u.slot LIMIT 1 FOR UPDATE SKIP LOCKED;
        IF free IS NOT NULL THEN
            UPDATE hapax.key_usage u
            SET keys = u.keys + count_usage.keys, bytes = u.bytes + count_usage.bytes,
                callers = u.callers + count_usage.callers
            WHERE u.owner = count_usage.owner AND u.slot = free
            RETURNING u.keys = 0 AND u.bytes = 0 AND u.callers = 0 INTO is_zero;
            IF NOT is_zero OR free = 0 AND EXISTS (
                SELECT FROM hapax.key_usage u WHERE u.owner = count_usage.owner AND u.slot <> 0)
            THEN
                RETURN 0;
            END IF;
            DELETE FROM hapax.key_usage u WHERE u.owner = count_usage.owner AND u.slot = free;
            RETURN CASE WHEN free = 0 THEN -1 ELSE 0 END;
        END IF;
        IF NOT EXISTS (SELECT FROM hapax.key_usage u WHERE u.owner = count_usage.owner) THEN
            INSERT INTO hapax.key_usage AS u (owner, slot, keys, bytes, callers)
            VALUES (count_usage.owner, 0, count_usage.keys, count_usage.bytes, count_usage.callers)
            ON CONFLICT DO NOTHING;
            IF FOUND THEN
                RETURN 1;
            END IF;
        END IF;
    END IF;
    INSERT INTO hapax.key_usage (owner, slot, keys, bytes, callers)
    VALUES (count_usage.owner, nextval('hapax.key_usage_slot'), count_usage.keys, count_usage.bytes,
            count_usage.callers);
    RETURN 0;
END $$;
