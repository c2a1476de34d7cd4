-- Keeps: reading a backlog is cheap. Each number is read from the partial index of its state, and
-- counting stops at $1.
SELECT h.source, h.name,
    least(
        (SELECT min(due.due_at) FROM hapax.lane l, LATERAL (
            SELECT j.due_at FROM hapax.job j
            WHERE j.handler = h.handler AND j.lane = l.lane AND j.state = hapax.job_state('ready')
            ORDER BY j.due_at LIMIT 1) due
         WHERE l.handler = h.handler),
        (SELECT min(j.due_at) FROM hapax.job j WHERE j.handler = h.handler AND j.state = hapax.job_state('leased'))
    ),
    (SELECT count(*) FROM (SELECT FROM hapax.job j
        WHERE j.handler = h.handler AND j.state = hapax.job_state('ready') LIMIT $1) w),
    (SELECT count(*) FROM (SELECT FROM hapax.job j
        WHERE j.handler = h.handler AND j.state = hapax.job_state('leased') LIMIT $1) w),
    (SELECT count(*) FROM (SELECT FROM hapax.job j
        WHERE j.handler = h.handler AND j.state = hapax.job_state('held') LIMIT $1) w),
    (SELECT count(*) FROM (SELECT FROM hapax.job j
        WHERE j.handler = h.handler AND j.state = hapax.job_state('parked') LIMIT $1) w),
    (SELECT count(*) FROM (SELECT FROM hapax.job j
        WHERE j.handler = h.handler AND j.state = hapax.job_state('review') LIMIT $1) w),
    (SELECT count(*) FROM (SELECT FROM hapax.job j
        WHERE j.handler = h.handler AND j.state = hapax.job_state('dead') LIMIT $1) w)
FROM hapax.handler h ORDER BY h.source COLLATE "C", h.name COLLATE "C"
