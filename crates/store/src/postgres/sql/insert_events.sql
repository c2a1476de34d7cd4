-- Keeps: one Event per (tenant, source, event id) and per guard. The unique hash and the unique guard
-- decide the races. Rows are sorted by hash, so that two batches rarely deadlock. If there are jobs,
-- insert_jobs.sql follows.
WITH arrived AS (
    SELECT * FROM unnest($1::hapax.arrived[]) WITH ORDINALITY AS a (
        id, hash, tenant, source, event_id, event_type, occurred_at, received_at, body_hash,
        request_id, remote, secret, signed_at, headers, body, guard, guard_us,
        replay_hash, has_jobs, n
    )
), accepted AS (
    INSERT INTO hapax.event (id, hash, tenant, source, event_id, event_type, occurred_at,
                             received_at, body_hash, request_id, remote, secret, signed_at,
                             guard, guard_until, has_jobs)
    SELECT id, hash, tenant, source, event_id, event_type, occurred_at, received_at, body_hash,
           request_id, remote, secret, signed_at, guard,
           coalesce($2::timestamptz, statement_timestamp()) + guard_us * interval '1 microsecond',
           has_jobs
    FROM arrived
    -- One subquery for each row, because no plan can turn it into a scan of the table. A suspected
    -- replay under this id has the same bytes: this arrival is a copy of it.
    WHERE (SELECT true FROM hapax.seen s WHERE s.hash = guard) IS NULL
      AND (SELECT true FROM hapax.event e WHERE e.hash = replay_hash) IS NULL
    ON CONFLICT DO NOTHING
    RETURNING id
), bodies AS (
    INSERT INTO hapax.body (id, headers, body)
    SELECT a.id, a.headers, a.body FROM arrived a JOIN accepted USING (id)
