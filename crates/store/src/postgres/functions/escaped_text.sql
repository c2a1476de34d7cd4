-- The sender's bytes as text. Bytes that are not text (a NUL, or not UTF-8) are escaped, so that one
-- such event does not break a whole view.
CREATE OR REPLACE FUNCTION hapax.escaped_text(bytes bytea) RETURNS text
LANGUAGE plpgsql IMMUTABLE STRICT SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    RETURN convert_from(bytes, 'UTF8');
EXCEPTION WHEN character_not_in_repertoire OR untranslatable_character THEN
    RETURN encode(bytes, 'escape');
END $$;
