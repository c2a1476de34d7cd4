-- Keeps: a handler's statement never writes to a table of Hapax, whatever its search_path is and
-- however deep in a user's function it runs. Handlers' transactions set hapax.in_handler. The
-- functions of this schema may still write: their names are on the call stack, with the schema
-- because each function sets a search_path. Such a line names PL/pgSQL in every language of the server, before
-- the function or after it, and the function may be quoted. A line of a statement, which the stack also shows,
-- does not name PL/pgSQL.
CREATE OR REPLACE FUNCTION hapax.refuse_handler() RETURNS trigger
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    stack text;
BEGIN
    GET DIAGNOSTICS stack = PG_CONTEXT;
    -- The first line is this function.
    IF substr(stack, strpos(stack, E'\n'))
        ~ E'\n(?=[^\n]*PL/pgSQL)([^"\n]*[^a-z0-9_$."\n])?"?hapax\\.[a-z_]+\\(' THEN
        RETURN NULL;
    END IF;
    RAISE EXCEPTION 'a handler must not write to hapax.%, a table of Hapax''s own', TG_TABLE_NAME
        USING ERRCODE = 'insufficient_privilege',
              HINT = 'Name your own table with its schema, or call a function of the schema hapax.';
END $$;
