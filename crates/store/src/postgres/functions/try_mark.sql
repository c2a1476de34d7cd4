-- Locks the row of a mark without waiting. Returns false if another transaction holds it. A missing
-- row is inserted. The advisory lock keeps two inserting transactions from waiting for each other.
CREATE OR REPLACE FUNCTION hapax.try_mark(of_lane integer, of_resource text) RETURNS boolean
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    PERFORM FROM hapax.mark m WHERE m.lane = of_lane AND m.resource = of_resource
    FOR UPDATE SKIP LOCKED;
    IF FOUND THEN
        RETURN true;
    END IF;
    -- The row is read first: inserting a row that another transaction is changing would wait for
    -- that transaction.
    PERFORM FROM hapax.mark m WHERE m.lane = of_lane AND m.resource = of_resource;
    IF FOUND OR NOT pg_try_advisory_xact_lock(hashtextextended(of_resource, of_lane)) THEN
        RETURN false;
    END IF;
    INSERT INTO hapax.mark (lane, resource) VALUES (of_lane, of_resource) ON CONFLICT DO NOTHING;
    RETURN FOUND;
END $$;
