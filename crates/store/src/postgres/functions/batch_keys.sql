-- Keeps: many reservations and answers of Idempotency-Keys in one commit, each decided as if it came alone.
-- Answers are written first, because retries of the same key may wait for them. `n` counts from 1,
-- answers before asks. kept: the answer was stored under its fence. outcome: as of
-- hapax.reserve_key, or 'later' for a stored answer beyond `bytes_max`, which is read alone. A key
-- that another transaction has locked fails the batch after `lock_ms`.
CREATE OR REPLACE FUNCTION hapax.batch_keys(
    answers hapax.key_answer[], asks hapax.key_ask[], instead hapax.key_answer, bytes_max bigint,
    lock_ms integer, now_at timestamptz
) RETURNS TABLE (n integer, kept boolean, outcome text, fence bigint, attempt integer,
                 remaining_us bigint, status integer, headers text, body bytea)
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
#variable_conflict use_column
DECLARE
    a record;
    r record;
    held bigint := 0;
BEGIN
    PERFORM set_config('lock_timeout', batch_keys.lock_ms::text, true);
    FOR a IN
        SELECT * FROM unnest(answers) WITH ORDINALITY AS u (
            scope, key, fence, status, headers, body, size, owner, max_keys, max_bytes, place)
    LOOP
        batch_keys.n := a.place;
        IF a.owner IS NULL OR hapax.has_room(a.owner, a.max_keys, a.max_bytes, false) THEN
            batch_keys.kept := hapax.finish_key(a.scope, a.key, a.fence, a.status, a.headers, a.body,
                                                batch_keys.now_at, a.size);
        ELSE
            batch_keys.kept := hapax.finish_key(a.scope, a.key, a.fence, instead.status,
                                                instead.headers, instead.body, batch_keys.now_at,
                                                instead.size);
        END IF;
        RETURN NEXT;
    END LOOP;
    batch_keys.kept := NULL;
    FOR a IN
        SELECT * FROM unnest(asks) WITH ORDINALITY AS u (
            scope, key, fingerprint, lease_us, ttl_us, owner, max_keys, max_bytes, place)
    LOOP
        SELECT k.* INTO r FROM hapax.reserve_key(
            a.scope, a.key, a.fingerprint, a.lease_us * interval '1 microsecond',
            a.ttl_us * interval '1 microsecond', batch_keys.now_at, a.owner, a.max_keys,
            a.max_bytes) k;
        batch_keys.n := cardinality(answers) + a.place;
        batch_keys.outcome := r.outcome;
        batch_keys.fence := r.fence;
        batch_keys.attempt := r.attempt;
        batch_keys.remaining_us := (extract(epoch FROM r.remaining) * 1000000)::bigint;
        batch_keys.status := r.status;
        batch_keys.headers := r.headers::text;
        batch_keys.body := r.body;
        IF r.body IS NOT NULL THEN
            IF held > bytes_max THEN
                batch_keys.outcome := 'later';
                batch_keys.body := NULL;
            END IF;
            held := held + octet_length(r.body);
        END IF;
        RETURN NEXT;
    END LOOP;
END $$;
