-- Keeps: an attempt has one end, recorded under its fence. Returns whether the outcome was
-- recorded; true for a second "delivered" under the same fence. of_verdict: 0 delivered, 1 failed,
-- 2 given back. how and wait: as in hapax.failed. The rules are those of
-- hapax_core::delivery::step. of_key: the key of the delivery, if the delivery exists and has one:
-- the caller then readies the next delivery under it. of_circuit: the number of the endpoint's
-- circuit at the claim, if this is the first record of the attempt's end. is_dead: the delivery
-- became a dead letter.
CREATE OR REPLACE FUNCTION hapax.settle_attempt(
    of_message bigint, of_endpoint integer, of_fence bigint, of_verdict integer, of_took bigint,
    of_status integer, of_answer text, of_error text, how integer, wait bigint,
    dice double precision, at timestamptz, OUT is_recorded boolean, OUT of_key text,
    OUT of_circuit bigint, OUT is_dead boolean)
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    d hapax.delivery;
    scheduled bigint;
    micros double precision;
    unsent integer;
BEGIN
    SELECT * INTO d FROM hapax.delivery x
    WHERE x.message = of_message AND x.endpoint = of_endpoint
    FOR UPDATE;
    of_key := d.key;
    is_recorded := false;
    is_dead := false;
    IF NOT FOUND OR d.fence <> of_fence OR d.started_at IS NULL THEN
        RETURN;
    END IF;
    IF of_verdict = 0 THEN
        is_recorded := true;
        IF d.state = hapax.delivery_state('delivered') THEN
            RETURN;
        END IF;
        of_circuit := d.circuit;
        -- The receiver has the message, even if the attempt was recorded as lost since.
        UPDATE hapax.delivery x
        SET state = hapax.delivery_state('delivered'), due_at = at, error = NULL, took_ms = of_took,
            answer_status = of_status, answer = of_answer
        WHERE x.message = of_message AND x.endpoint = of_endpoint;
        IF d.state <> hapax.delivery_state('leased') THEN
            -- The attempt was recorded as lost, and was only slow.
            DELETE FROM hapax.delivery_attempt a
            WHERE a.message = of_message AND a.endpoint = of_endpoint AND a.attempt = d.attempt;
        END IF;
        RETURN;
    END IF;
    IF d.state <> hapax.delivery_state('leased') THEN
        RETURN;
    END IF;
    is_recorded := true;
    of_circuit := d.circuit;
    IF of_verdict = 2 THEN
        UPDATE hapax.delivery x
        SET state = hapax.delivery_state('ready'), due_at = at, attempt = greatest(x.attempt - 1, 0),
            fence = hapax.next_fence(x.fence), started_at = NULL, node = NULL
        WHERE x.message = of_message AND x.endpoint = of_endpoint;
        RETURN;
    END IF;
    of_error := left(of_error, 1200);
    PERFORM hapax.note_delivery_attempt(d, of_error, of_took, of_status, of_answer);
    unsent := d.attempt - d.earlier_attempts - d.steps - d.lost;
    IF how = 4 AND unsent <= 20 THEN
        UPDATE hapax.delivery x
        SET state = hapax.delivery_state('ready'), error = of_error,
            due_at = at + least(2 ^ least(greatest(unsent - 1, 0), 16), 300)
                * (0.8 + 0.4 * dice) * interval '1 second'
        WHERE x.message = of_message AND x.endpoint = of_endpoint;
        RETURN;
    END IF;
    -- The wait before the attempt after the next step; past the last one there is none.
    SELECT e.retry[d.steps + 2] INTO scheduled FROM hapax.endpoint e WHERE e.endpoint = of_endpoint;
    IF scheduled IS NULL OR how = 3 THEN
        is_dead := true;
        UPDATE hapax.delivery x
        SET state = hapax.delivery_state('dead'), due_at = at, steps = x.steps + 1, error = of_error
        WHERE x.message = of_message AND x.endpoint = of_endpoint;
    ELSE
        micros := scheduled * (0.8 + 0.4 * dice);
        micros := CASE how WHEN 1 THEN greatest(micros, wait) WHEN 2 THEN wait ELSE micros END;
        UPDATE hapax.delivery x
        SET state = hapax.delivery_state('ready'), due_at = at + micros * interval '1 microsecond',
            steps = x.steps + 1, error = of_error
        WHERE x.message = of_message AND x.endpoint = of_endpoint;
    END IF;
END $$;
