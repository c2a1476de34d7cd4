-- The tenant of a message: one that names none belongs to its event's tenant, so that no tenant can
-- use up another's ids. And how large a message may be: the same as for hapax.publish on
-- PostgreSQL.

DROP TRIGGER hapax_publish_insert;
CREATE TRIGGER hapax_publish_insert INSTEAD OF INSERT ON hapax_publish BEGIN
    SELECT RAISE(ABORT, 'hapax_publish: type and data must not be null')
    WHERE NEW.type IS NULL OR NEW.data IS NULL;
    SELECT RAISE(ABORT, 'hapax_publish: type and id must not be empty')
    WHERE NEW.type = '' OR NEW.id = '';
    SELECT RAISE(ABORT, 'hapax_publish: at most 255 bytes of type, key, tenant and id')
    WHERE max(octet_length(NEW.type), coalesce(octet_length(NEW.key), 0),
              coalesce(octet_length(NEW.tenant), 0), coalesce(octet_length(NEW.id), 0)) > 255;
    SELECT RAISE(ABORT, 'hapax_publish: at most 1 MiB of data')
    WHERE octet_length(NEW.data) > 1048576;
    SELECT RAISE(ABORT, 'hapax_publish: data is not JSON') WHERE NOT json_valid(NEW.data);
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
