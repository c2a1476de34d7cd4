-- Whether the whole batch has room, together with all concurrent transactions: each caller is far enough
-- below its quota, and each API below 16 times that quota. If not, hapax.has_room decides each act.
CREATE OR REPLACE FUNCTION hapax.has_ample_room(answers hapax.key_answer[], asks hapax.key_ask[])
RETURNS boolean
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    more_keys CONSTANT bigint := cardinality(asks);
    more_bytes CONSTANT bigint := (SELECT coalesce(sum(a.size), 0) FROM unnest(answers) AS a);
    o record;
    own record;
    api record;
BEGIN
    FOR o IN
        SELECT a.owner, a.max_keys, a.max_bytes FROM unnest(answers) AS a WHERE a.owner IS NOT NULL
        UNION
        SELECT a.owner, a.max_keys, a.max_bytes FROM unnest(asks) AS a WHERE a.owner IS NOT NULL
    LOOP
        SELECT count(*) AS slots, coalesce(sum(u.keys), 0) AS keys, coalesce(sum(u.bytes), 0) AS bytes
        INTO own FROM hapax.key_usage u WHERE u.owner = o.owner;
        SELECT count(*) AS slots, coalesce(sum(u.keys), 0) AS keys, coalesce(sum(u.bytes), 0) AS bytes
        INTO api FROM hapax.key_usage u WHERE u.owner = split_part(o.owner, '/', 1);
        -- hapax.has_room merges the rows of an owner that has many.
        IF own.slots > 50 OR api.slots > 50
            OR own.keys + more_keys >= o.max_keys - hapax.key_margin()
            OR own.bytes + more_bytes >= o.max_bytes - hapax.byte_margin(o.max_bytes)
            OR api.keys + more_keys >= 16 * o.max_keys::numeric - hapax.key_margin()
            OR api.bytes + more_bytes >= 16 * o.max_bytes::numeric - hapax.byte_margin(o.max_bytes)
        THEN
            RETURN false;
        END IF;
    END LOOP;
    RETURN true;
END $$;
