-- Keeps: the circuit of an endpoint follows its answers, in the commit that settles them. An
-- outcome under another number than the circuit's is ignored. signal: 0 the endpoint works, 1 it
-- fails, 2 it fails and asks for a pause (microseconds), 3 it asks to be disabled, 4 nothing is
-- known. Locks the endpoint's state, then the endpoint. A change of its standing is published.
CREATE OR REPLACE FUNCTION hapax.note_answer(
    of_endpoint integer, number bigint, signal integer, pause bigint, error text, at timestamptz)
RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    s hapax.endpoint_state;
    later hapax.endpoint_state;
    e hapax.endpoint;
    event CONSTANT integer := CASE signal WHEN 0 THEN 1 WHEN 3 THEN 4 WHEN 4 THEN 3 ELSE 2 END;
    -- Why it is disabled.
    why text := CASE WHEN signal = 3 THEN error END;
    reason text;
BEGIN
    SELECT * INTO s FROM hapax.endpoint_state x WHERE x.endpoint = of_endpoint FOR UPDATE;
    IF NOT FOUND OR s.circuit <> number THEN
        RETURN;
    END IF;
    SELECT * INTO e FROM hapax.endpoint x WHERE x.endpoint = of_endpoint;
    later := hapax.judge_circuit(s, event, NULL, e.max_in_flight, at);
    IF signal = 2 THEN
        later.blocked_until := greatest(later.blocked_until, at + pause * interval '1 microsecond');
    END IF;
    IF event = 2 AND e.auto_disable AND later.failures >= 5
        AND later.failing_since + interval '120 hours' <= at
    THEN
        why := 'every attempt failed for 5 days; the last error: ' || error;
        later := hapax.judge_circuit(later, 4, NULL, e.max_in_flight, at);
    END IF;
    IF later IS NOT DISTINCT FROM s THEN
        RETURN;
    END IF;
    UPDATE hapax.endpoint_state x
    SET circuit = later.circuit, failures = later.failures, failing_since = later.failing_since,
        open_until = later.open_until, open_for = later.open_for, slots = later.slots,
        blocked_until = later.blocked_until
    WHERE x.endpoint = of_endpoint;
    reason := CASE
        WHEN later.open_until IS NULL THEN NULL
        WHEN why IS NOT NULL THEN
            'the endpoint was disabled automatically: one delivery is sent first, as a test'
        WHEN event = 2 THEN hapax.open_reason(later.failures, error)
        ELSE e.failing END;
    UPDATE hapax.endpoint x
    SET failing = reason,
        disabled_at = CASE WHEN why IS NULL THEN x.disabled_at ELSE coalesce(x.disabled_at, at) END,
        disabled_reason = CASE WHEN why IS NULL OR x.disabled_at IS NOT NULL THEN x.disabled_reason
                               ELSE why END,
        disabled_by = CASE WHEN why IS NULL OR x.disabled_at IS NOT NULL THEN x.disabled_by
                           ELSE 'automatic' END,
        version = x.version + CASE WHEN why IS NULL OR x.disabled_at IS NOT NULL THEN 0 ELSE 1 END
    WHERE x.endpoint = of_endpoint
      AND (x.failing IS DISTINCT FROM reason OR why IS NOT NULL AND x.disabled_at IS NULL);
    IF FOUND THEN
        PERFORM hapax.publish_standing(e, at);
    END IF;
END $$;
