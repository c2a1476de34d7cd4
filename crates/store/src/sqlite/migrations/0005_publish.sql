-- Whose a message is: one that names no tenant is of its event's, so that no tenant can use up
-- another's ids.

DROP TRIGGER hapax_publish_insert;
CREATE TRIGGER hapax_publish_insert INSTEAD OF INSERT ON hapax_publish BEGIN
    SELECT RAISE(ABORT, 'hapax_publish: type is missing') WHERE NEW.type IS NULL OR NEW.type = '';
    SELECT RAISE(ABORT, 'hapax_publish: data is not JSON') WHERE NEW.data IS NULL OR NOT json_valid(NEW.data);
    INSERT INTO hapax_message (tenant, id, type, data, key, event_seq, created_at)
    SELECT coalesce(NEW.tenant,
                    (SELECT p.tenant FROM hapax_event e JOIN hapax_pair p ON p.pair = e.pair
                     WHERE e.seq = hapax_current.event_seq),
                    'default'),
           coalesce(NEW.id, 'msg_' || lower(hex(randomblob(16)))),
           NEW.type, NEW.data, NEW.key, event_seq,
           coalesce(at, CAST(unixepoch('subsec') * 1000000 AS INTEGER))
    FROM hapax_current WHERE true
    ON CONFLICT (tenant, id) DO NOTHING;
END;

-- Nothing is sent yet: the shape that this view will have.
CREATE VIEW hapax_deliveries AS
SELECT NULL AS id, NULL AS message, NULL AS endpoint, NULL AS status, NULL AS attempt,
       NULL AS created_at, NULL AS delivered_at
WHERE 0;
