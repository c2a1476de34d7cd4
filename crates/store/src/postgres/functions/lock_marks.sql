-- In the transaction of the work: locks the marks of these resources, always in the same order, and
-- returns their positions. The wait is bounded, because waiting must not use up the time of the work.
CREATE OR REPLACE FUNCTION hapax.lock_marks(lanes integer[], resources text[])
RETURNS TABLE (lane integer, resource text, place bigint)
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
SET lock_timeout = '2s'
AS $$
#variable_conflict use_column
BEGIN
    FOR lane, resource IN
        SELECT DISTINCT r.lane, r.resource FROM unnest(lanes, resources) r (lane, resource)
        ORDER BY 1, 2
    LOOP
        SELECT m.position INTO place FROM hapax.mark m
        WHERE m.lane = lock_marks.lane AND m.resource = lock_marks.resource
        FOR UPDATE;
        IF NOT FOUND THEN
            INSERT INTO hapax.mark (lane, resource) VALUES (lock_marks.lane, lock_marks.resource)
            ON CONFLICT DO NOTHING;
            SELECT m.position INTO place FROM hapax.mark m
            WHERE m.lane = lock_marks.lane AND m.resource = lock_marks.resource
            FOR UPDATE;
        END IF;
        RETURN NEXT;
    END LOOP;
END $$;
