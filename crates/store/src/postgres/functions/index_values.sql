-- Keeps: the marks move only with the rows that they cover, and no row is added for an event that has lost
-- its body. Retention cannot run at the same time. Releases the right to index. Returns false and writes
-- nothing if another node has moved the marks or retention is running.
CREATE OR REPLACE FUNCTION hapax.index_values(
    of_fields uuid, was_through uuid, now_through uuid, was_checked uuid, now_checked uuid,
    events uuid[], hashes uuid[]) RETURNS boolean
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    PERFORM hapax.commit_without_sync();
    IF NOT pg_try_advisory_xact_lock_shared(x'6861706178000003'::bigint) THEN
        UPDATE hapax.search_mark m SET busy_until = '-infinity' WHERE m.fields = of_fields;
        RETURN false;
    END IF;
    UPDATE hapax.search_mark m
    SET through = now_through, checked = now_checked, busy_until = '-infinity'
    WHERE m.fields = of_fields AND m.through = was_through
      AND m.checked IS NOT DISTINCT FROM was_checked;
    IF NOT FOUND THEN
        RETURN false;
    END IF;
    INSERT INTO hapax.search_value (event, hash)
    SELECT v.event, v.hash FROM unnest(events, hashes) v (event, hash)
    WHERE EXISTS (SELECT FROM hapax.body b WHERE b.id = v.event)
    ORDER BY v.hash, v.event
    ON CONFLICT DO NOTHING;
    RETURN true;
END $$;
