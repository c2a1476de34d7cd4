-- Keeps: copies are counted, and the newest few of each event are stored in full. A deferred write:
-- a crash may lose the last copies, so no request waits for the disk.
CREATE OR REPLACE FUNCTION hapax.count_copies(
    events uuid[], counts bigint[], lasts timestamptz[],
    seen_events uuid[], seen_ats timestamptz[], seen_request_ids uuid[], seen_remotes inet[],
    seen_secrets integer[], seen_signed_ats timestamptz[], keep integer
) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
#variable_conflict use_column
DECLARE
    many uuid[];
BEGIN
    PERFORM set_config('synchronous_commit', 'off', true);
    -- An event that is deleted in between would leave its copies behind for ever: see hapax.forget.
    PERFORM pg_advisory_xact_lock_shared(x'6861706178000004'::bigint);
    WITH counted AS (
        INSERT INTO hapax.copy AS c (event, copies, conflicts, last_at)
        SELECT u.event, u.copies, 0, u.last_at
        FROM unnest(events, counts, lasts) AS u (event, copies, last_at)
        JOIN hapax.event e ON e.id = u.event
        ORDER BY u.event
        ON CONFLICT (event) DO UPDATE
        SET copies = c.copies + excluded.copies, last_at = greatest(c.last_at, excluded.last_at)
        RETURNING c.event, c.copies
    )
    SELECT array_agg(n.event) INTO many FROM counted n WHERE n.copies > keep;
    INSERT INTO hapax.arrival (event, received_at, request_id, conflict, remote, secret, signed_at)
    SELECT u.event, u.received_at, u.request_id, false, u.remote, u.secret, u.signed_at
    FROM unnest(seen_events, seen_ats, seen_request_ids, seen_remotes, seen_secrets,
                seen_signed_ats)
         AS u (event, received_at, request_id, remote, secret, signed_at)
    JOIN hapax.event e ON e.id = u.event
    ORDER BY u.event, u.received_at, u.request_id
    ON CONFLICT DO NOTHING;
    IF many IS NOT NULL THEN
        DELETE FROM hapax.arrival a USING (
            SELECT o.event, o.received_at, o.request_id, row_number() OVER (
                       PARTITION BY o.event ORDER BY o.received_at DESC, o.request_id DESC) AS place
            FROM hapax.arrival o WHERE o.event = ANY (many) AND NOT o.conflict
        ) old
        WHERE old.place > keep AND a.event = old.event AND a.received_at = old.received_at
          AND a.request_id = old.request_id;
    END IF;
END $$;
