-- Reads only: an event that exists already, with its status over all its jobs. An event without jobs and
-- body is pruned; the column `pruned` is the status that it ended with. An open event that never had a job
-- has the status "ignored", whether it is pruned or not: only its own row is read.
SELECT e.hash, e.id, e.body_hash, e.state, e.review,
       CASE WHEN j.rank IS NULL AND (e.has_jobs OR e.state <> hapax.event_state('open'))
                 AND (SELECT true FROM hapax.body b WHERE b.id = e.id) IS NULL
            THEN coalesce((SELECT n.status FROM hapax.ended n WHERE n.event = e.id),
                          CASE WHEN e.has_jobs THEN 'processed' ELSE 'ignored' END) END AS pruned,
       j.rank, j.result, e.guard
FROM hapax.event e
LEFT JOIN LATERAL (
    SELECT min(hapax.rank(j.state, j.steps)) AS rank,
           (array_agg(j.result ORDER BY j.job) FILTER (WHERE j.result IS NOT NULL))[1] AS result
    FROM hapax.job j WHERE e.has_jobs AND j.job >= e.id AND j.job <= hapax.last_job(e.id)
) j ON true
