-- Keeps: one Event per (tenant, source, event id). The unique hash decides the race; rows come and go
-- in sorted by it, so that two batches never wait in a circle. Where there are jobs, insert_jobs.sql
-- follows.
WITH arrived AS (
    SELECT * FROM unnest($1::hapax.arrived[]) WITH ORDINALITY AS a (
        id, hash, tenant, source, event_id, event_type, occurred_at, received_at, body_hash,
        request_id, remote, secret, signed_at, headers, body, n
    )
), accepted AS (
    INSERT INTO hapax.event (id, hash, tenant, source, event_id, event_type, occurred_at,
                             received_at, body_hash, request_id, remote, secret, signed_at)
    SELECT id, hash, tenant, source, event_id, event_type, occurred_at, received_at, body_hash,
           request_id, remote, secret, signed_at
    FROM arrived
    ON CONFLICT (hash) DO NOTHING
    RETURNING id
), bodies AS (
    INSERT INTO hapax.body (id, headers, body)
    SELECT a.id, a.headers, a.body FROM arrived a JOIN accepted USING (id)
