-- Keeps: one Event per (tenant, source, event id), and the jobs it promises in the same commit. The
-- unique hash decides the race; rows go in sorted by it, so that two batches never wait in a circle.
WITH arrived AS (
    SELECT * FROM unnest(
        $1::uuid[], $2::bytea[], $3::text[], $4::text[], $5::bytea[], $6::bytea[],
        $7::timestamptz[], $8::timestamptz[], $9::bytea[], $10::uuid[], $11::inet[],
        $12::integer[], $13::timestamptz[], $14::bytea[], $15::bytea[]
    ) WITH ORDINALITY AS a (
        id, hash, tenant, source, event_id, event_type, occurred_at, received_at, body_hash,
        request_id, remote, secret, signed_at, headers, body, n
    )
), accepted AS (
    INSERT INTO hapax.event (id, hash, tenant, source, event_id, event_type, occurred_at,
                             received_at, body_hash, request_id, remote, secret, signed_at)
    SELECT id, hash, tenant, source, event_id, event_type, occurred_at, received_at, body_hash,
           request_id, remote, secret, signed_at
    FROM arrived ORDER BY hash
    ON CONFLICT (hash) DO NOTHING
    RETURNING id
), bodies AS (
    INSERT INTO hapax.body (id, headers, body)
    SELECT a.id, a.headers, a.body FROM arrived a JOIN accepted USING (id)
), jobs AS (
    -- A lane that is not there leaves no due time, and the whole statement fails: work that nobody
    -- would find must not be promised.
    INSERT INTO hapax.job (job, event, handler, lane, state, due_at, resource, position, error)
    SELECT hapax.job_id(a.id, j.lane), a.id, j.handler, j.lane, j.state,
           coalesce($23::timestamptz, statement_timestamp())
               + h.retry[1] * interval '1 microsecond',
           j.resource, j.position, j.error
    FROM unnest($16::integer[], $17::integer[], $18::integer[], $19::smallint[], $20::text[],
                $21::bigint[], $22::text[])
         AS j (n, handler, lane, state, resource, position, error)
    JOIN arrived a ON a.n = j.n
    JOIN accepted ON accepted.id = a.id
    LEFT JOIN hapax.lane l ON l.lane = j.lane AND l.handler = j.handler AND l.tenant = a.tenant
    LEFT JOIN hapax.handler h ON h.handler = l.handler
)
SELECT id FROM accepted
