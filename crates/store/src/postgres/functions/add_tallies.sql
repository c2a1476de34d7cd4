-- The sums of the counts in both arrays, by kind and index. The lowest 12 bits of each number hold
-- kind and index, the bits above them the count.
CREATE OR REPLACE FUNCTION hapax.add_tallies(one bigint[], other bigint[]) RETURNS bigint[]
LANGUAGE sql IMMUTABLE SET search_path = pg_catalog, pg_temp AS $$
    SELECT coalesce(array_agg((summed.count << 12) | summed.code ORDER BY summed.code), '{}')
    FROM (SELECT number & 4095 AS code, sum(number >> 12)::bigint AS count
          FROM unnest(one || other) AS number GROUP BY 1) AS summed
$$;
