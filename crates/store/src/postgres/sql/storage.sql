-- The disk space of each table of Hapax, the partitions of one table together, and of the whole
-- database.
SELECT coalesce(parent.relname, c.relname)::text AS name,
       sum(pg_total_relation_size(c.oid))::bigint AS bytes,
       sum(greatest(c.reltuples, 0))::bigint AS rows,
       pg_database_size(current_database())::bigint AS database
FROM pg_class AS c
LEFT JOIN pg_inherits AS i ON i.inhrelid = c.oid
LEFT JOIN pg_class AS parent ON parent.oid = i.inhparent
WHERE c.relnamespace = 'hapax'::regnamespace AND c.relkind = 'r'
GROUP BY 1
ORDER BY 2 DESC, 1
