-- Keeps: the rules of hapax_core::order, for statements that decide under a lock.
CREATE OR REPLACE FUNCTION hapax.guard(h hapax.handler, mark bigint, place bigint) RETURNS smallint
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    verdict smallint;
BEGIN
    IF h.policy IS NULL THEN
        RETURN hapax.order_verdict('run');
    ELSIF h.policy = hapax.order_policy('latest') THEN
        RETURN CASE WHEN place < mark THEN hapax.order_verdict('stale')
                    ELSE hapax.order_verdict('run') END;
    ELSIF h.policy = hapax.order_policy('sequence') THEN
        RETURN CASE
            WHEN mark IS NOT NULL THEN CASE
                WHEN place <= mark THEN hapax.order_verdict('stale')
                WHEN place - 1 = mark THEN hapax.order_verdict('run')
                ELSE hapax.order_verdict('hold') END
            WHEN h.start_at IS NULL OR place = h.start_at THEN hapax.order_verdict('run')
            WHEN place < h.start_at THEN hapax.order_verdict('stale')
            ELSE hapax.order_verdict('hold') END;
    END IF;
    SELECT t.says INTO verdict FROM hapax.transition t
    WHERE t.handler = h.handler AND t.from_at = coalesce(mark, -1) AND t.to_at = place;
    IF FOUND THEN
        RETURN verdict;
    END IF;
    -- A mark that is not a state of the current machine counts as none.
    PERFORM FROM hapax.transition t
    WHERE t.handler = h.handler AND t.from_at = mark AND t.to_at = mark;
    IF NOT FOUND THEN
        SELECT t.says INTO verdict FROM hapax.transition t
        WHERE t.handler = h.handler AND t.from_at = -1 AND t.to_at = place;
    END IF;
    RETURN coalesce(verdict, hapax.order_verdict('stale'));
END $$;
