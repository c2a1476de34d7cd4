-- Whether a caller has room: for another key, or (with of_keys false) for an answer. All callers of an
-- API together may have 16 times the quota of one. Beyond that, each caller has its fair share. Close
-- to a caller's own quota, its requests are decided one after the other, under a lock that ends with
-- the statement.
CREATE OR REPLACE FUNCTION hapax.has_room(owner text, max_keys bigint, max_bytes bigint, of_keys boolean)
RETURNS boolean
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
#variable_conflict use_column
DECLARE
    own record;
    api record;
    callers numeric;
BEGIN
    FOR round IN 1 .. 2 LOOP
        SELECT coalesce(sum(u.keys), 0)::bigint AS keys, coalesce(sum(u.bytes), 0)::bigint AS bytes,
               count(*) AS slots
        INTO own FROM hapax.key_usage u WHERE u.owner = has_room.owner;
        EXIT WHEN own.keys < max_keys - hapax.key_margin()
            AND own.bytes < max_bytes - hapax.byte_margin(max_bytes);
        IF round = 1 THEN
            PERFORM pg_advisory_xact_lock(1751216225, hashtext(has_room.owner));
        END IF;
    END LOOP;
    SELECT coalesce(sum(u.keys), 0)::numeric AS keys, coalesce(sum(u.bytes), 0)::numeric AS bytes,
           coalesce(sum(u.callers), 0)::numeric AS callers, count(*) AS slots
    INTO api FROM hapax.key_usage u WHERE u.owner = split_part(has_room.owner, '/', 1);
    IF own.slots > 50 THEN
        PERFORM hapax.merge_usage_of(has_room.owner);
    END IF;
    IF api.slots > 50 THEN
        PERFORM hapax.merge_usage_of(split_part(has_room.owner, '/', 1));
    END IF;
    callers := greatest(api.callers + CASE WHEN own.slots = 0 THEN 1 ELSE 0 END, 1);
    RETURN own.bytes < max_bytes
        AND (api.bytes < 16 * max_bytes::numeric
             OR (own.bytes + 1) * callers <= 16 * max_bytes::numeric)
        AND (NOT of_keys
             OR own.keys < max_keys
                AND (api.keys < 16 * max_keys::numeric
                     OR (own.keys + 1) * callers <= 16 * max_keys::numeric));
END $$;
