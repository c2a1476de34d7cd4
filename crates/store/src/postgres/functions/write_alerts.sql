-- Keeps: an alert is raised once and cleared once, whichever node finds it. Writes the changes of a
-- report: rows, subjects that are over, and the messages about both. Returns false and writes
-- nothing if another report was written after the rows were read (of_version), or if of_judge no
-- longer holds the lease of the judge.
CREATE OR REPLACE FUNCTION hapax.write_alerts(
    of_version bigint, of_judge uuid, rows_json text, over text[], types text[], datas text[], keys text[],
    now_at timestamptz DEFAULT NULL)
RETURNS boolean
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
#variable_conflict use_column
DECLARE
    at CONSTANT timestamptz := coalesce(now_at, clock_timestamp());
    m record;
BEGIN
    UPDATE hapax.alert_board b SET version = b.version + 1
    WHERE b.version = of_version AND (of_judge IS NULL OR (b.judge = of_judge AND b.judge_until > at));
    IF NOT FOUND THEN
        RETURN false;
    END IF;
    DELETE FROM hapax.alert a WHERE a.subject = ANY (over);
    INSERT INTO hapax.alert AS a
        (subject, key, data, reporter, state, found, published, since, seen_at,
         silenced_until, silence_reason, silenced_by)
    SELECT r.subject, r.key, r.data, r.reporter, r.state, r.found, r.published, r.since, r.seen_at,
           r.silenced_until, r.silence_reason, r.silenced_by
    FROM json_to_recordset(rows_json::json) AS r (
        subject text, key text, data text, reporter uuid, state smallint, found boolean, published boolean,
        since timestamptz, seen_at timestamptz, silenced_until timestamptz, silence_reason text,
        silenced_by text)
    ON CONFLICT (subject) DO UPDATE
    SET data = excluded.data, reporter = excluded.reporter, state = excluded.state, found = excluded.found,
        published = excluded.published, since = excluded.since, seen_at = excluded.seen_at,
        silenced_until = excluded.silenced_until, silence_reason = excluded.silence_reason,
        silenced_by = excluded.silenced_by;
    FOR m IN SELECT * FROM unnest(types, datas, keys) x (type, data, key) LOOP
        PERFORM hapax.publish_own(m.type, m.data, m.key, at);
    END LOOP;
    RETURN true;
END $$;
