-- Keeps: a handler's statement never writes to a table of ours, whatever search_path it runs under
-- and however deep in a user's function it is. Handlers' transactions set hapax.in_handler. The
-- functions of this schema write as before: they are on the call stack, by their full name since
-- each sets a search_path.
CREATE OR REPLACE FUNCTION hapax.refuse_handler() RETURNS trigger
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    stack text;
BEGIN
    GET DIAGNOSTICS stack = PG_CONTEXT;
    -- The first line is this function.
    IF substr(stack, strpos(stack, E'\n')) ~ E'\n[^"\n]*hapax\\.[a-z_]+\\(' THEN
        RETURN NULL;
    END IF;
    RAISE EXCEPTION 'a handler must not write to hapax.%, a table of Hapax''s own', TG_TABLE_NAME
        USING ERRCODE = 'insufficient_privilege',
              HINT = 'Name your own table with its schema, or call a function of the schema hapax.';
END $$;
