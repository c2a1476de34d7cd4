-- Keeps: no delivery stays dead, held or parked for longer than kept_us, and none is cancelled for its age
-- before its endpoint was announced for notice_us. The rules are those of hapax_core::store::ExpiryTimes.
-- Checks at most `most` endpoints with numbers above `after`, and cancels at most `most` deliveries.
-- Returns a row for each endpoint whose expiry was announced (cancelled is null) or whose deliveries were
-- cancelled. If the round continues, a last row without an id has the number with which the next call
-- begins.
CREATE OR REPLACE FUNCTION hapax.expire_deliveries(
    after integer, kept_us bigint, notice_us bigint, most integer, now_at timestamptz DEFAULT NULL)
RETURNS TABLE (endpoint integer, id uuid, tenant text, oldest timestamptz, cancelled integer)
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
#variable_conflict use_column
DECLARE
    at CONSTANT timestamptz := coalesce(now_at, statement_timestamp());
    cancel_before CONSTANT timestamptz := at - kept_us * interval '1 microsecond';
    announce_before CONSTANT timestamptz :=
        at - greatest(kept_us - notice_us, 0) * interval '1 microsecond';
    announced_by CONSTANT timestamptz := at - notice_us * interval '1 microsecond';
    passed integer := after;
    looked integer := 0;
    room integer := most;
    e record;
    d hapax.delivery;
    since timestamptz;
    gone integer;
BEGIN
    LOOP
        IF looked >= most OR room <= 0 THEN
            RETURN QUERY SELECT passed, NULL::uuid, NULL::text, NULL::timestamptz, NULL::integer;
            RETURN;
        END IF;
        -- The next endpoint that has dead or parked deliveries, is disabled, or was announced.
        SELECT min(n.endpoint) INTO passed FROM (
            (SELECT x.endpoint FROM hapax.delivery x
             WHERE x.state = hapax.delivery_state('dead') AND x.endpoint > passed
             ORDER BY x.endpoint, x.due_at LIMIT 1)
            UNION ALL
            (SELECT x.endpoint FROM hapax.delivery x
             WHERE x.state = hapax.delivery_state('parked') AND x.endpoint > passed
             ORDER BY x.endpoint, x.due_at LIMIT 1)
            UNION ALL
            (SELECT x.endpoint FROM hapax.endpoint x
             WHERE x.disabled_at IS NOT NULL AND x.deleted_at IS NULL AND x.endpoint > passed
             ORDER BY x.endpoint LIMIT 1)
            UNION ALL
            (SELECT x.endpoint FROM hapax.endpoint x
             WHERE x.expiry_announced_at IS NOT NULL AND x.endpoint > passed
             ORDER BY x.endpoint LIMIT 1)) n;
        EXIT WHEN passed IS NULL;
        looked := looked + 1;
        -- The endpoint is locked, so that two nodes do not both announce it, and no operator
        -- enables it meanwhile.
        SELECT x.id, x.tenant, x.disabled_at, x.deleted_at, x.expiry_announced_at INTO e
        FROM hapax.endpoint x WHERE x.endpoint = passed FOR NO KEY UPDATE SKIP LOCKED;
        CONTINUE WHEN NOT FOUND;
        since := least(
            (SELECT x.due_at FROM hapax.delivery x
             WHERE x.endpoint = passed AND x.state = hapax.delivery_state('dead')
             ORDER BY x.due_at LIMIT 1),
            (SELECT x.due_at FROM hapax.delivery x
             WHERE x.endpoint = passed AND x.state = hapax.delivery_state('parked')
               AND e.deleted_at IS NULL
             ORDER BY x.due_at LIMIT 1),
            (SELECT greatest(x.due_at, e.disabled_at) FROM hapax.delivery x
             WHERE x.endpoint = passed AND x.state = hapax.delivery_state('ready')
               AND e.disabled_at IS NOT NULL AND e.deleted_at IS NULL
             ORDER BY x.due_at LIMIT 1));
        IF e.deleted_at IS NULL AND e.expiry_announced_at IS NULL THEN
            IF since < announce_before THEN
                UPDATE hapax.endpoint x SET expiry_announced_at = at WHERE x.endpoint = passed;
                IF e.tenant <> 'hapax' THEN
                    PERFORM hapax.publish_own(
                        'hapax.delivery.expiring',
                        jsonb_build_object(
                            'endpoint', e.id, 'tenant', e.tenant, 'since', hapax.time_text(since),
                            'cancelled_from', hapax.time_text(greatest(
                                since + kept_us * interval '1 microsecond',
                                at + notice_us * interval '1 microsecond')))::text,
                        e.id::text, at);
                END IF;
                RETURN QUERY SELECT passed, e.id, e.tenant, since, NULL::integer;
            END IF;
            CONTINUE;
        ELSIF e.deleted_at IS NULL AND (since < announce_before) IS NOT TRUE THEN
            UPDATE hapax.endpoint x SET expiry_announced_at = NULL WHERE x.endpoint = passed;
            CONTINUE;
        END IF;
        CONTINUE WHEN (since < cancel_before) IS NOT TRUE
            OR e.deleted_at IS NULL AND e.expiry_announced_at > announced_by;
        gone := 0;
        -- Parked deliveries are cancelled first: the end of the dead one that they wait for would
        -- send them.
        FOR d IN
            SELECT o.* FROM (
                SELECT x.* FROM hapax.delivery x
                WHERE x.endpoint = passed AND x.state = hapax.delivery_state('parked')
                  AND x.due_at < cancel_before AND e.deleted_at IS NULL
                ORDER BY x.due_at LIMIT room FOR UPDATE SKIP LOCKED) o
            UNION ALL
            SELECT o.* FROM (
                SELECT x.* FROM hapax.delivery x
                WHERE x.endpoint = passed AND x.state = hapax.delivery_state('dead')
                  AND x.due_at < cancel_before
                ORDER BY x.due_at LIMIT room FOR UPDATE SKIP LOCKED) o
            UNION ALL
            SELECT o.* FROM (
                SELECT x.* FROM hapax.delivery x
                WHERE x.endpoint = passed AND x.state = hapax.delivery_state('ready')
                  AND x.due_at < cancel_before AND e.disabled_at < cancel_before
                  AND e.deleted_at IS NULL
                ORDER BY x.due_at LIMIT room FOR UPDATE SKIP LOCKED) o
        LOOP
            EXIT WHEN gone >= room;
            PERFORM hapax.expire_delivery(d, at);
            gone := gone + 1;
        END LOOP;
        room := room - gone;
        IF gone > 0 THEN
            RETURN QUERY SELECT passed, e.id, e.tenant, since, gone;
        END IF;
        IF room <= 0 THEN
            -- The endpoint may have more.
            passed := passed - 1;
        END IF;
    END LOOP;
END $$;
