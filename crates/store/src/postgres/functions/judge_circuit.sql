-- The circuit of an endpoint after an event, as hapax_core::circuit::step decides; the same row if nothing
-- changes. event: 0 a claim probes the endpoint (the lease ends at lease_end), 1 the endpoint works, 2 the
-- endpoint fails, 3 the claim ended and says nothing about the endpoint, 4 the endpoint is disabled for its
-- failures or because it asked for that, 5 an operator enables the endpoint. The function reads no table.
CREATE OR REPLACE FUNCTION hapax.judge_circuit(
    s hapax.endpoint_state, event integer, lease_end timestamptz, max_in_flight integer,
    at timestamptz)
RETURNS hapax.endpoint_state
LANGUAGE plpgsql IMMUTABLE SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    minute CONSTANT bigint := 60000000;
    hour CONSTANT bigint := 3600000000;
BEGIN
    IF event = 0 THEN
        IF s.open_until <= at THEN
            s.circuit := s.circuit + 1;
            s.open_until := lease_end;
        END IF;
    ELSIF event = 1 THEN
        s.failures := 0;
        s.failing_since := NULL;
        IF s.open_until IS NULL THEN
            s.slots := CASE WHEN s.slots * 2::bigint < max_in_flight THEN s.slots * 2 END;
        ELSE
            s.circuit := s.circuit + 1;
            s.open_until := NULL;
            s.open_for := 0;
            s.slots := 2;
        END IF;
    ELSIF event = 2 THEN
        s.failures := s.failures + 1;
        s.failing_since := coalesce(s.failing_since, at);
        IF s.open_until IS NOT NULL OR s.failures >= 5 THEN
            s.circuit := s.circuit + 1;
            s.open_for := CASE WHEN s.open_until IS NULL THEN minute
                               ELSE least(greatest(s.open_for * 2, minute), hour) END;
            s.open_until := at + s.open_for * interval '1 microsecond';
        END IF;
    ELSIF event = 3 THEN
        IF s.open_until IS NOT NULL THEN
            s.open_until := at;
        END IF;
    ELSIF event = 4 THEN
        s.circuit := s.circuit + 1;
        s.failing_since := NULL;
        s.open_until := at;
        s.open_for := minute;
        s.slots := NULL;
    ELSIF event = 5 THEN
        IF s.open_until > at THEN
            s.circuit := s.circuit + 1;
            s.open_until := at;
        END IF;
    END IF;
    RETURN s;
END $$;
