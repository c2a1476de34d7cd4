-- Keeps: the newest few copies of each event as rows, and the number of the others. Most copies cost one
-- row and no lock on another. This is a deferred write: no request waits for the disk, and a crash
-- may lose the last copies. `many` are events with copies that are only counted, `crowded` those
-- that may have too many rows now. Copies of an event whose body was pruned are only counted: a row would
-- keep an address for as long as the key.
CREATE OR REPLACE FUNCTION hapax.count_copies(
    copies hapax.copied[], many uuid[], counts bigint[], crowded uuid[], keep integer
) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
#variable_conflict use_column
DECLARE
    stored uuid[];
BEGIN
    PERFORM set_config('synchronous_commit', 'off', true);
    -- An event that is deleted in between would leave its copies behind for ever: see hapax.forget.
    PERFORM pg_advisory_xact_lock_shared(x'6861706178000004'::bigint);
    WITH stored AS (
        INSERT INTO hapax.arrival (event, received_at, request_id, conflict, remote, secret,
                                   signed_at)
        SELECT u.event, u.received_at, u.request_id, false, u.remote, u.secret, u.signed_at
        FROM unnest(copies) AS u
        WHERE (SELECT true FROM hapax.body b WHERE b.id = u.event) IS NOT NULL
        ON CONFLICT DO NOTHING
        RETURNING event
    )
    SELECT coalesce(array_agg(s.event), '{}') INTO stored FROM stored s;
    IF cardinality(stored) < cardinality(copies) THEN
        -- One request contained an event twice, or the event was pruned or deleted.
        INSERT INTO hapax.copy AS c (event, only_counted, conflicts)
        SELECT l.event, l.missing, 0 FROM (
            SELECT b.event, sum(b.n) AS missing FROM (
                SELECT u.event, 1 AS n FROM unnest(copies) AS u
                UNION ALL SELECT s.event, -1 FROM unnest(stored) AS s (event)
            ) b GROUP BY b.event HAVING sum(b.n) > 0
        ) l
        WHERE (SELECT true FROM hapax.event e WHERE e.id = l.event) IS NOT NULL
        ORDER BY l.event
        ON CONFLICT (event) DO UPDATE SET only_counted = c.only_counted + excluded.only_counted;
    END IF;
    IF cardinality(many) > 0 THEN
        INSERT INTO hapax.copy AS c (event, only_counted, conflicts)
        SELECT u.event, u.copies, 0
        FROM unnest(many, counts) AS u (event, copies)
        WHERE (SELECT true FROM hapax.event e WHERE e.id = u.event) IS NOT NULL
        ORDER BY u.event
        ON CONFLICT (event) DO UPDATE SET only_counted = c.only_counted + excluded.only_counted;
    END IF;
    IF cardinality(crowded) > 0 THEN
        WITH old AS (
            SELECT o.event, o.received_at, o.request_id
            FROM unnest(crowded) AS u (event)
            CROSS JOIN LATERAL (
                SELECT a.event, a.received_at, a.request_id FROM hapax.arrival a
                WHERE a.event = u.event AND NOT a.conflict
                ORDER BY a.received_at DESC, a.request_id DESC OFFSET keep
            ) o
        ), gone AS (
            DELETE FROM hapax.arrival a USING old
            WHERE a.event = old.event AND a.received_at = old.received_at
              AND a.request_id = old.request_id
            RETURNING a.event
        )
        INSERT INTO hapax.copy AS c (event, only_counted, conflicts)
        SELECT g.event, count(*), 0 FROM gone g GROUP BY g.event ORDER BY g.event
        ON CONFLICT (event) DO UPDATE SET only_counted = c.only_counted + excluded.only_counted;
    END IF;
END $$;
