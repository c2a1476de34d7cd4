-- What arriving events need beyond the one statement that most of them are.

-- The last id that a job of this event can have: its jobs are the range from the event's own id to
-- this. Without a search_path of its own, so that it can be written into the queries that use it.
CREATE FUNCTION hapax.last_job(event uuid) RETURNS uuid
LANGUAGE sql IMMUTABLE STRICT PARALLEL SAFE
RETURN pg_catalog.encode(
    overlay(pg_catalog.uuid_send(event) PLACING '\xffffff'::pg_catalog.bytea FROM 14), 'hex'
)::pg_catalog.uuid;

-- Where a job puts its event in the order of statuses: the lowest of all jobs is told.
-- 0 review, 1 discarded, 2 dead, 3 failed, 4 held, 5 processing, 6 received, 7 processed, 8 stale.
CREATE FUNCTION hapax.rank(state smallint, steps integer) RETURNS integer
LANGUAGE sql IMMUTABLE STRICT PARALLEL SAFE
RETURN CASE state
    WHEN 7 THEN 0 WHEN 8 THEN 1 WHEN 4 THEN 2 WHEN 5 THEN 4
    WHEN 1 THEN 5 WHEN 2 THEN 7 WHEN 3 THEN 8
    ELSE CASE WHEN steps > 0 THEN 3 ELSE 6 END
END;

-- Keeps: one number per handler, and one per handler and tenant.
CREATE FUNCTION hapax.lane_of(
    of_source text, of_name text, of_tenant text, OUT handler integer, OUT lane integer
)
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
#variable_conflict use_column
BEGIN
    -- Looked for first: a failed insert would still use up a number.
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
