-- Keeps: an alert is raised once, however many nodes report it, and cleared once, when no node has reported it
-- for quiet_us. The primary key decides. subjects, datas, keys: the alerts that are active on this node; keys are
-- the order keys of the messages about them. At most `most` are cleared.
CREATE OR REPLACE FUNCTION hapax.note_alerts(
    subjects text[], datas text[], keys text[], quiet_us bigint, most integer,
    now_at timestamptz DEFAULT NULL, OUT raised integer, OUT cleared integer)
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
#variable_conflict use_column
DECLARE
    at CONSTANT timestamptz := coalesce(now_at, statement_timestamp());
    a record;
BEGIN
    raised := 0;
    cleared := 0;
    -- Rows are written in one order on every node, since each is locked until the commit.
    FOR a IN
        SELECT * FROM unnest(subjects, datas, keys) x (subject, data, key) ORDER BY x.subject
    LOOP
        INSERT INTO hapax.alert (subject, data, key, raised_at, seen_at)
        VALUES (a.subject, a.data, a.key, at, at)
        ON CONFLICT (subject) DO NOTHING;
        IF FOUND THEN
            raised := raised + 1;
            PERFORM hapax.publish_own('hapax.alert.raised', a.data, a.key, at);
        ELSE
            UPDATE hapax.alert x SET seen_at = greatest(x.seen_at, at) WHERE x.subject = a.subject;
        END IF;
    END LOOP;
    FOR a IN
        SELECT x.subject, x.data, x.key FROM hapax.alert x
        WHERE x.seen_at < at - quiet_us * interval '1 microsecond'
        ORDER BY x.subject LIMIT most FOR UPDATE SKIP LOCKED
    LOOP
        DELETE FROM hapax.alert x WHERE x.subject = a.subject;
        cleared := cleared + 1;
        PERFORM hapax.publish_own('hapax.alert.cleared', a.data, a.key, at);
    END LOOP;
END $$;
