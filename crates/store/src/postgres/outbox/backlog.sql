-- Counts the deliveries in each state by index, up to $1 each. The endpoints with ready or parked
-- deliveries are found one by one.
WITH RECURSIVE waiting (endpoint, first_due) AS (
    (SELECT d.endpoint, d.due_at FROM hapax.delivery d
     WHERE d.state = hapax.delivery_state('ready')
     ORDER BY d.endpoint, d.due_at LIMIT 1)
    UNION ALL
    SELECT n.endpoint, n.due_at FROM waiting w CROSS JOIN LATERAL (
        SELECT d.endpoint, d.due_at FROM hapax.delivery d
        WHERE d.state = hapax.delivery_state('ready') AND d.endpoint > w.endpoint
        ORDER BY d.endpoint, d.due_at LIMIT 1) n
), standing AS (
    SELECT w.endpoint, w.first_due, e.disabled_at IS NOT NULL OR e.failing IS NOT NULL AS is_disabled
    FROM waiting w CROSS JOIN LATERAL (
        -- LIMIT 1 makes this one probe of the index for each endpoint.
        SELECT x.disabled_at, x.failing, x.deleted_at FROM hapax.endpoint x
        WHERE x.endpoint = w.endpoint LIMIT 1) e
    WHERE e.deleted_at IS NULL
), waiting_keys (endpoint) AS (
    (SELECT d.endpoint FROM hapax.delivery d
     WHERE d.state = hapax.delivery_state('parked')
     ORDER BY d.endpoint LIMIT 1)
    UNION ALL
    SELECT n.endpoint FROM waiting_keys w CROSS JOIN LATERAL (
        SELECT d.endpoint FROM hapax.delivery d
        WHERE d.state = hapax.delivery_state('parked') AND d.endpoint > w.endpoint
        ORDER BY d.endpoint LIMIT 1) n
), parking AS (
    SELECT w.endpoint, e.disabled_at IS NOT NULL OR e.failing IS NOT NULL AS is_disabled
    FROM waiting_keys w CROSS JOIN LATERAL (
        SELECT x.disabled_at, x.failing, x.deleted_at FROM hapax.endpoint x
        WHERE x.endpoint = w.endpoint LIMIT 1) e
    WHERE e.deleted_at IS NULL
)
SELECT
    (SELECT count(*) FROM (
        SELECT FROM standing s CROSS JOIN LATERAL (
            SELECT FROM hapax.delivery d
            WHERE d.endpoint = s.endpoint AND d.state = hapax.delivery_state('ready') LIMIT $1) n
        WHERE NOT s.is_disabled LIMIT $1) c),
    (SELECT count(*) FROM (
        SELECT FROM hapax.delivery d WHERE d.state = hapax.delivery_state('leased') LIMIT $1) c),
    (SELECT count(*) FROM ((
        SELECT FROM standing s CROSS JOIN LATERAL (
            SELECT FROM hapax.delivery d
            WHERE d.endpoint = s.endpoint AND d.state = hapax.delivery_state('ready') LIMIT $1) n
        WHERE s.is_disabled LIMIT $1)
        UNION ALL (
        SELECT FROM parking p CROSS JOIN LATERAL (
            SELECT FROM hapax.delivery d
            WHERE d.endpoint = p.endpoint AND d.state = hapax.delivery_state('parked') LIMIT $1) n
        WHERE p.is_disabled LIMIT $1)
        LIMIT $1) c),
    (SELECT count(*) FROM (
        SELECT FROM hapax.delivery d WHERE d.state = hapax.delivery_state('dead') LIMIT $1) c),
    (SELECT count(*) FROM (
        SELECT FROM parking p CROSS JOIN LATERAL (
            SELECT FROM hapax.delivery d
            WHERE d.endpoint = p.endpoint AND d.state = hapax.delivery_state('parked') LIMIT $1) n
        WHERE NOT p.is_disabled LIMIT $1) c),
    least(
        (SELECT min(s.first_due) FROM standing s WHERE NOT s.is_disabled),
        (SELECT min(l.due_at) FROM (
            SELECT d.due_at FROM hapax.delivery d CROSS JOIN LATERAL (
                SELECT x.disabled_at, x.failing, x.deleted_at FROM hapax.endpoint x
                WHERE x.endpoint = d.endpoint LIMIT 1) e
            WHERE d.state = hapax.delivery_state('leased') AND e.disabled_at IS NULL
              AND e.failing IS NULL
              AND e.deleted_at IS NULL
            ORDER BY d.due_at LIMIT 1) l))
