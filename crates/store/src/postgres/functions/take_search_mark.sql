-- Keeps: one node at a time indexes for a set of fields. Takes the right to index for 30 seconds, and
-- returns how far the index has come. Returns null if another node has the right. Marks that no node has
-- used for a day are deleted.
CREATE OR REPLACE FUNCTION hapax.take_search_mark(
    of_fields uuid, now_at timestamptz DEFAULT NULL,
    OUT through uuid, OUT checked uuid, OUT at timestamptz)
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    at := coalesce(now_at, statement_timestamp());
    PERFORM hapax.commit_without_sync();
    INSERT INTO hapax.search_mark (fields) VALUES (of_fields) ON CONFLICT DO NOTHING;
    -- A lease that ends later than this was written before the clock was set back.
    UPDATE hapax.search_mark m SET busy_until = at + interval '30 seconds', seen_at = at
    WHERE m.fields = of_fields AND (m.busy_until <= at OR m.busy_until > at + interval '30 seconds')
    RETURNING m.through, m.checked INTO through, checked;
    DELETE FROM hapax.search_mark m
    WHERE m.fields <> of_fields AND m.seen_at < at - interval '1 day';
END $$;
