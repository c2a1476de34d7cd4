-- Gaps: how long a job is held, and the operator's decision afterwards.

-- state, further: 7 review, 8 discarded.
-- due_at, further: held: until when; review: since when.
-- forced: an operator, or a gap held long enough, lets it run whatever the order guard decides.
ALTER TABLE hapax_job ADD COLUMN forced INTEGER NOT NULL DEFAULT 0;

-- A job that is held already gets ten minutes from when it was held.
UPDATE hapax_job SET due_at = due_at + 600000000 WHERE state = 5;

DROP INDEX hapax_job_waits;
CREATE INDEX hapax_job_held      ON hapax_job (lane, resource, position) WHERE state = 5;
CREATE INDEX hapax_job_overdue   ON hapax_job (lane, due_at) WHERE state = 5;
CREATE INDEX hapax_job_parked    ON hapax_job (lane, resource, position) WHERE state = 6;
CREATE INDEX hapax_job_review    ON hapax_job (lane) WHERE state = 7;
CREATE INDEX hapax_job_discarded ON hapax_job (lane) WHERE state = 8;

DROP VIEW hapax_processed_events;
CREATE VIEW hapax_processed_events AS
WITH standing AS (
    SELECT e.seq,
           CASE WHEN e.state = 1 THEN 'review'
                WHEN e.state = 2 THEN 'discarded'
                ELSE CASE (SELECT min(CASE j.state WHEN 7 THEN 0
                                           WHEN 8 THEN 1
                                           WHEN 4 THEN 2
                                           WHEN 5 THEN 4
                                           WHEN 1 THEN 5
                                           WHEN 2 THEN 7
                                           WHEN 3 THEN 8
                                           ELSE CASE WHEN j.steps > 0 THEN 3 ELSE 6 END END)
                           FROM hapax_job j WHERE j.event_seq = e.seq)
                     WHEN 0 THEN 'review' WHEN 1 THEN 'discarded' WHEN 2 THEN 'dead' WHEN 3 THEN 'failed' WHEN 4 THEN 'held'
                     WHEN 5 THEN 'processing' WHEN 6 THEN 'received' WHEN 7 THEN 'processed'
                     WHEN 8 THEN 'stale' ELSE 'ignored' END
           END AS status
    FROM hapax_event e)
SELECT lower(substr(hex(e.id), 1, 8) || '-' || substr(hex(e.id), 9, 4) || '-' || substr(hex(e.id), 13, 4)
             || '-' || substr(hex(e.id), 17, 4) || '-' || substr(hex(e.id), 21)) AS id,
       e.event_id,
       p.tenant,
       p.source,
       b.event_type,
       lower(substr(hex(e.id), 1, 8) || '-' || substr(hex(e.id), 9, 4) || '-' || substr(hex(e.id), 13, 4)
             || '-' || substr(hex(e.id), 17, 4) || '-' || substr(hex(e.id), 21)) AS idempotency_key,
       strftime('%Y-%m-%dT%H:%M:%fZ', e.received_at / 1000000.0, 'unixepoch') AS received_at,
       CASE WHEN s.status IN ('processed', 'stale') THEN
            (SELECT strftime('%Y-%m-%dT%H:%M:%fZ', max(j.due_at) / 1000000.0, 'unixepoch')
             FROM hapax_job j WHERE j.event_seq = e.seq) END AS processed_at,
       s.status IN ('processed', 'stale') AS processed,
       s.status,
       (SELECT j.result FROM hapax_job j WHERE j.event_seq = e.seq AND j.result IS NOT NULL
        ORDER BY j.lane LIMIT 1) AS result,
       CAST(b.body AS TEXT) AS payload
FROM hapax_event e JOIN hapax_body b ON b.seq = e.seq JOIN hapax_pair p ON p.pair = e.pair
     JOIN standing s ON s.seq = e.seq;
