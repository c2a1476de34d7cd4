-- Keeps: one Event per (tenant, source, event id) and per guard, with its jobs, in the cases that need
-- more than one lookup: late events, replays, derived keys, conflicts. Unique hashes and guards decide
-- every race: the loser reads again. Rows are sorted by hash, so that two batches rarely deadlock.
-- verdict: 0 accepted, 1 duplicate, 2 conflict, 3 review, 4 released from review.
CREATE OR REPLACE FUNCTION hapax.ingest(
    arrived hapax.arrived[], doubts hapax.doubt[], promised hapax.promised[],
    conflicts_max bigint, now_at timestamptz
) RETURNS TABLE (row_number integer, verdict smallint, id uuid)
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
#variable_conflict use_column
DECLARE
    moment CONSTANT timestamptz := coalesce(now_at, statement_timestamp());
    r record;
    met hapax.event;
    holder uuid;
    filed uuid;
    key_hash uuid;
    key_event_id bytea;
    why smallint;
    counted bigint;
    decided smallint;
    decided_id uuid;
BEGIN
    -- The same notification on both sides of a span's edge has two keys, so no constraint decides
    -- between them. A transaction that reads a neighbouring key must not miss another that is
    -- writing it.
    PERFORM pg_advisory_xact_lock(l.lock) FROM (
        SELECT DISTINCT
            ('x' || encode(substr(uuid_send(one_of.hash), 1, 8), 'hex'))::bit(64)::bigint AS lock
        FROM ROWS FROM (unnest(arrived), unnest(doubts)) AS u,
             LATERAL (VALUES (u.hash), (u.before), (u.after)) AS one_of (hash)
        WHERE u.before IS NOT NULL
        ORDER BY 1
    ) l;
    FOR r IN
        SELECT * FROM ROWS FROM (unnest(arrived), unnest(doubts)) WITH ORDINALITY AS u (
            id, hash, tenant, source, event_id, event_type, occurred_at, received_at, body_hash,
            request_id, remote, secret, signed_at, headers, body, guard, guard_us, replay_hash,
            has_jobs, late, copies, before, after, not_before, not_after, other_hash, other_event_id,
            replay_event_id, n
        )
    LOOP
        decided := NULL;
        FOR turn IN 1..8 LOOP
            key_hash := r.hash;
            key_event_id := r.event_id;
            holder := NULL;
            SELECT * INTO met FROM hapax.event e WHERE e.hash = r.hash;
            IF NOT FOUND AND r.before IS NOT NULL THEN
                SELECT * INTO met FROM hapax.event e
                WHERE e.hash IN (r.before, r.after)
                  AND e.received_at BETWEEN r.not_before AND r.not_after
                ORDER BY e.received_at LIMIT 1;
            END IF;
            IF r.guard IS NOT NULL THEN
                SELECT e.id INTO holder FROM hapax.event e WHERE e.guard = r.guard;
                IF NOT FOUND THEN
                    SELECT s.event INTO holder FROM hapax.seen s WHERE s.hash = r.guard;
                END IF;
                IF met.id IS NULL AND holder IS NOT NULL AND r.copies THEN
                    SELECT * INTO met FROM hapax.event e WHERE e.id = holder;
                    -- The event was deleted since it was read, and its guard with it.
                    CONTINUE WHEN NOT FOUND;
                END IF;
            END IF;
            filed := NULL;
            IF r.replay_hash IS NOT NULL AND met.body_hash IS DISTINCT FROM r.body_hash THEN
                SELECT e.id INTO filed FROM hapax.event e WHERE e.hash = r.replay_hash;
            END IF;
            IF filed IS NOT NULL THEN
                decided := 1;
                decided_id := filed;
                EXIT;
            ELSIF r.replay_hash IS NOT NULL AND met.body_hash IS DISTINCT FROM r.body_hash
                AND holder IS DISTINCT FROM met.id AND holder IS NOT NULL
            THEN
                -- A suspected replay does not take the id it arrived under, because that id is not
                -- signed.
                key_hash := r.replay_hash;
                key_event_id := r.replay_event_id;
                why := hapax.review_reason('replay');
            ELSIF met.id IS NULL THEN
                why := CASE WHEN r.late THEN hapax.review_reason('late')
                            ELSE hapax.review_reason('none') END;
            ELSIF met.body_hash = r.body_hash OR (r.copies AND met.id = holder) THEN
                -- Unsigned bytes may differ although all signed content is the same.
                decided := 1;
                decided_id := met.id;
                -- Content that ran as another event is a replay of that event, on time or not.
                IF met.state = hapax.event_state('review')
                    AND met.review = hapax.review_reason('late') AND NOT r.late
                    AND (holder IS NULL OR holder = met.id)
                THEN
                    UPDATE hapax.event e SET state = hapax.event_state('open'), has_jobs = r.has_jobs
                    WHERE e.id = met.id AND e.state = hapax.event_state('review');
                    IF NOT FOUND THEN
                        -- Another transaction was faster: read its row.
                        decided := NULL;
                        CONTINUE;
                    END IF;
                    decided := 4;
                END IF;
                EXIT;
            ELSIF r.other_hash IS NOT NULL THEN
                -- A derived key may be too coarse, so the event is stored under a separate key, for
                -- review.
                key_hash := r.other_hash;
                key_event_id := r.other_event_id;
                SELECT e.id INTO decided_id FROM hapax.event e WHERE e.hash = r.other_hash;
                decided_id := coalesce(decided_id, holder);
                IF decided_id IS NOT NULL THEN
                    decided := 1;
                    EXIT;
                END IF;
                why := hapax.review_reason('conflict');
            ELSE
                -- Retention may have deleted the event since it was read, and nothing would ever delete the rows
                -- below. The lock keeps the event until they are committed: hapax.forget passes locked events.
                PERFORM FROM hapax.event e WHERE e.id = met.id FOR KEY SHARE;
                CONTINUE WHEN NOT FOUND;
                INSERT INTO hapax.copy AS c (event, only_counted, conflicts)
                VALUES (met.id, 0, 1)
                ON CONFLICT (event) DO UPDATE SET conflicts = c.conflicts + 1
                RETURNING c.conflicts INTO counted;
                IF counted <= conflicts_max THEN
                    INSERT INTO hapax.arrival (event, received_at, request_id, conflict, remote,
                                               secret, signed_at, body)
                    SELECT met.id, r.received_at, r.request_id, true, r.remote, r.secret,
                           r.signed_at, r.body
                    -- A conflict with a pruned event is only counted.
                    WHERE (SELECT true FROM hapax.body b WHERE b.id = met.id) IS NOT NULL
                    ON CONFLICT DO NOTHING;
                END IF;
                IF counted > conflicts_max OR NOT FOUND THEN
                    UPDATE hapax.copy c SET only_counted = c.only_counted + 1 WHERE c.event = met.id;
                END IF;
                decided := 2;
                decided_id := met.id;
                EXIT;
            END IF;
            INSERT INTO hapax.event (id, hash, tenant, source, event_id, event_type, occurred_at,
                                     received_at, body_hash, state, review, request_id, remote,
                                     secret, signed_at, guard, guard_until, has_jobs)
            VALUES (r.id, key_hash, r.tenant, r.source, key_event_id, r.event_type, r.occurred_at,
                    r.received_at, r.body_hash,
                    CASE WHEN why = hapax.review_reason('none') THEN hapax.event_state('open')
                         ELSE hapax.event_state('review') END, why,
                    r.request_id, r.remote, r.secret, r.signed_at,
                    CASE WHEN holder IS NULL THEN r.guard END,
                    CASE WHEN holder IS NULL THEN moment + r.guard_us * interval '1 microsecond' END,
                    why = hapax.review_reason('none') AND r.has_jobs)
            ON CONFLICT DO NOTHING;
            IF FOUND THEN
                INSERT INTO hapax.body (id, headers, body) VALUES (r.id, r.headers, r.body);
                decided := CASE WHEN why = hapax.review_reason('none') THEN 0 ELSE 3 END;
                decided_id := r.id;
                EXIT;
            END IF;
        END LOOP;
        IF decided IS NULL THEN
            RAISE EXCEPTION 'an event was never to be had' USING ERRCODE = 'serialization_failure';
        END IF;
        IF (decided IN (1, 4) OR decided = 2 AND NOT r.copies) AND r.guard IS NOT NULL
            AND holder IS NULL
        THEN
            -- The signed content of a copy is stored too: if it is captured and sent under another
            -- id, that is a replay as well. The lock keeps retention from deleting the event in
            -- between. If the id is part of the guarded content (r.copies), no other id can have the content
            -- of a conflict. With its guard, the next such arrival would be a copy of the event, although the
            -- bodies differ.
            INSERT INTO hapax.seen (hash, event, until)
            SELECT r.guard, e.id, moment + r.guard_us * interval '1 microsecond'
            FROM hapax.event e WHERE e.id = decided_id FOR KEY SHARE
            ON CONFLICT DO NOTHING;
        END IF;
        IF decided IN (0, 4) THEN
            INSERT INTO hapax.job (job, event, handler, lane, state, due_at, resource, position,
                                   error)
            SELECT hapax.job_id(decided_id, j.lane), decided_id, j.handler, j.lane, j.state,
                   hapax.first_due(moment, h.retry, j.state),
                   j.resource, j.position, j.error
            FROM unnest(promised) AS j
            LEFT JOIN hapax.lane l
                 ON l.lane = j.lane AND l.handler = j.handler AND l.tenant = r.tenant
            LEFT JOIN hapax.handler h ON h.handler = l.handler
            WHERE j.n = r.n;
        END IF;
        ingest.row_number := r.n;
        ingest.verdict := decided;
        ingest.id := decided_id;
        RETURN NEXT;
    END LOOP;
END $$;
