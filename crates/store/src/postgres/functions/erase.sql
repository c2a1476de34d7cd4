-- One slice of a deletion of a tenant's data: reads at most 5000 rows and erases at most `most` events, messages or
-- keys. is_more: there is more to do now. hashes: the keys of the erased events.
-- Keeps: rows of a transaction that began before the deletion and committed later are erased too. A pass over all
-- rows is the last one only if it began after all those transactions had ended and skipped no locked job.
CREATE OR REPLACE FUNCTION hapax.erase(
    most integer, now_at timestamptz DEFAULT NULL, OUT is_more boolean, OUT hashes uuid[])
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    at CONSTANT timestamptz := coalesce(now_at, statement_timestamp());
    nothing CONSTANT uuid := '00000000-0000-0000-0000-000000000000';
    d hapax.tenant_deletion;
    slice record;
    done integer;
BEGIN
    hashes := '{}';
    SELECT * INTO d FROM hapax.tenant_deletion x
    WHERE x.ended_at IS NULL AND x.next_at <= at ORDER BY x.next_at LIMIT 1
    FOR UPDATE SKIP LOCKED;
    is_more := FOUND;
    IF NOT FOUND THEN
        RETURN;
    END IF;
    IF d.is_last_pass IS NULL THEN
        d.is_last_pass := d.began_in < pg_snapshot_xmin(pg_current_snapshot());
    END IF;
    IF d.phase = 0 /* events */ THEN
        slice := hapax.erase_events(d, most);
        d := slice.d;
        hashes := slice.hashes;
    ELSIF d.phase = 1 /* messages */ THEN
        d := hapax.erase_messages(d, most);
    ELSIF d.phase = 2 /* keys of hapax.once */ THEN
        DELETE FROM hapax.once_key k USING (
            SELECT o.tenant, o.scope, o.key FROM hapax.once_key o
            WHERE o.tenant = d.tenant AND o.at <= d.began_at LIMIT most FOR UPDATE SKIP LOCKED) old
        WHERE k.tenant = old.tenant AND k.scope = old.scope AND k.key = old.key;
        GET DIAGNOSTICS done = ROW_COUNT;
        d.phase := CASE WHEN done < most THEN 3 /* over */ ELSE 2 END;
    ELSIF d.is_last_pass THEN
        d.ended_at := at;
    ELSE
        -- The next pass begins from the start, once the open transactions have had a moment to end.
        d.phase := 0 /* events */;
        d.is_last_pass := NULL;
        d.passed_source := '';
        d.passed_event := nothing;
        d.passed_message := 0;
        d.next_at := at + interval '1 second';
        is_more := EXISTS (SELECT FROM hapax.tenant_deletion x
                           WHERE x.ended_at IS NULL AND x.next_at <= at AND x.tenant <> d.tenant);
    END IF;
    UPDATE hapax.tenant_deletion x
    SET phase = d.phase, is_last_pass = d.is_last_pass, passed_source = d.passed_source,
        passed_event = d.passed_event, passed_message = d.passed_message, next_at = d.next_at,
        ended_at = d.ended_at, events = d.events, messages = d.messages
    WHERE x.tenant = d.tenant;
END $$;
