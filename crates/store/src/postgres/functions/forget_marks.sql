-- Keeps: the mark of a resource until no event can need it. Deletes marks that have not moved since
-- their source's `befores`, at most `most`, and checks the same number of lanes. The marks of
-- sequences and machines stay, because the next event needs them whenever it arrives. A locked mark
-- is skipped. Returns the last finished lane, as its handler and tenant; null if all lanes are
-- finished.
CREATE OR REPLACE FUNCTION hapax.forget_marks(
    sources text[], befores timestamptz[], after_handler integer, after_tenant text, most integer,
    OUT last_handler integer, OUT last_tenant text
)
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
-- A plan that was made while the tables were small must work for large ones too.
SET enable_seqscan = off
SET enable_bitmapscan = off
AS $$
DECLARE
    room integer := most;
    gone integer;
    h record;
    l record;
BEGIN
    PERFORM hapax.commit_without_sync();
    last_handler := after_handler;
    last_tenant := after_tenant;
    FOR h IN
        SELECT x.handler, b.before FROM unnest(sources, befores) AS b (source, before)
        CROSS JOIN LATERAL (
            SELECT o.handler FROM hapax.handler o
            WHERE o.source = b.source AND o.policy = hapax.order_policy('latest')
              AND o.handler >= after_handler) x
        ORDER BY x.handler
    LOOP
        FOR l IN
            SELECT x.lane, x.tenant FROM hapax.lane x
            WHERE x.handler = h.handler
              AND x.tenant > CASE h.handler WHEN after_handler THEN after_tenant ELSE '' END
            ORDER BY x.tenant LIMIT room
        LOOP
            -- Marks are found by their place: a join could read every mark of the lane.
            DELETE FROM hapax.mark m WHERE m.ctid = ANY (ARRAY(
                SELECT o.ctid FROM hapax.mark o
                WHERE o.lane = l.lane AND o.moved_at < h.before
                ORDER BY o.moved_at LIMIT room FOR UPDATE SKIP LOCKED));
            GET DIAGNOSTICS gone = ROW_COUNT;
            IF gone >= room AND gone > 0 THEN
                RETURN;
            END IF;
            last_handler := h.handler;
            last_tenant := l.tenant;
            room := room - greatest(gone, 1);
            IF room <= 0 THEN
                RETURN;
            END IF;
        END LOOP;
    END LOOP;
    last_handler := NULL;
    last_tenant := NULL;
END $$;
