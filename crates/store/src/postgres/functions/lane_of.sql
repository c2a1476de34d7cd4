-- Keeps: one number per handler, and one lane per handler and tenant.
CREATE OR REPLACE FUNCTION hapax.lane_of(
    of_source text, of_name text, of_tenant text, OUT handler integer, OUT lane integer
)
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
#variable_conflict use_column
BEGIN
    -- The row is read first: a failed insert would still use up a number.
    LOOP
        SELECT h.handler INTO lane_of.handler FROM hapax.handler h
        WHERE h.source = of_source AND h.name = of_name;
        EXIT WHEN FOUND;
        INSERT INTO hapax.handler (source, name) VALUES (of_source, of_name) ON CONFLICT DO NOTHING;
    END LOOP;
    LOOP
        SELECT l.lane INTO lane_of.lane FROM hapax.lane l
        WHERE l.handler = lane_of.handler AND l.tenant = of_tenant;
        EXIT WHEN FOUND;
        INSERT INTO hapax.lane (handler, tenant) VALUES (lane_of.handler, of_tenant)
        ON CONFLICT DO NOTHING;
    END LOOP;
END $$;
