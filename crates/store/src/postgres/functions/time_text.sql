-- A time as it is written in messages: RFC 3339 in UTC, without zeros at the end of a fraction.
CREATE OR REPLACE FUNCTION hapax.time_text(at timestamptz) RETURNS text
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    RETURN rtrim(rtrim(to_char(at AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US'), '0'), '.') || 'Z';
END $$;
