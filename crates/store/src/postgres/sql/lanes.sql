-- Keeps: looking at a backlog is cheap. Each number is read from the partial index of its state, and
-- counting stops at $1.
SELECT h.source, h.name,
    least(
        (SELECT min(due.due_at) FROM hapax.lane l, LATERAL (
            SELECT j.due_at FROM hapax.job j
            WHERE j.handler = h.handler AND j.lane = l.lane AND j.state = 0
            ORDER BY j.due_at LIMIT 1) due
         WHERE l.handler = h.handler),
        (SELECT min(j.due_at) FROM hapax.job j WHERE j.handler = h.handler AND j.state = 1)
    ),
    (SELECT count(*) FROM (SELECT FROM hapax.job j
        WHERE j.handler = h.handler AND j.state = 0 LIMIT $1) w),
    (SELECT count(*) FROM (SELECT FROM hapax.job j
        WHERE j.handler = h.handler AND j.state = 1 LIMIT $1) w),
    (SELECT count(*) FROM (SELECT FROM hapax.job j
        WHERE j.handler = h.handler AND j.state = 5 LIMIT $1) w),
    (SELECT count(*) FROM (SELECT FROM hapax.job j
        WHERE j.handler = h.handler AND j.state = 6 LIMIT $1) w),
    (SELECT count(*) FROM (SELECT FROM hapax.job j
        WHERE j.handler = h.handler AND j.state = 7 LIMIT $1) w),
    (SELECT count(*) FROM (SELECT FROM hapax.job j
        WHERE j.handler = h.handler AND j.state = 4 LIMIT $1) w)
FROM hapax.handler h ORDER BY h.source COLLATE "C", h.name COLLATE "C"
