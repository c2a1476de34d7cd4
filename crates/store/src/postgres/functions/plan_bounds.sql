-- The numbers of the messages that were published in a time: none before `first` and none after `last` can be
-- of it. A message gets its number and its time within a minute of each other, so that of two messages whose
-- times are further apart the later one has the higher number.
CREATE OR REPLACE FUNCTION hapax.plan_bounds(
    since timestamptz, until timestamptz, OUT first bigint, OUT last bigint)
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    SELECT m.message + 1 INTO first FROM hapax.message m
    WHERE m.created_at < since - interval '1 minute' ORDER BY m.created_at DESC LIMIT 1;
    SELECT m.message - 1 INTO last FROM hapax.message m
    WHERE m.created_at > until + interval '1 minute' ORDER BY m.created_at LIMIT 1;
    first := coalesce(first, 0);
    last := coalesce(last, (SELECT max(m.message) FROM hapax.message m), 0);
END $$;
