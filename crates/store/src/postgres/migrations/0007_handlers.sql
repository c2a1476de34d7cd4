-- The rights of handlers on the tables of this schema: none, except through the functions.

-- Keeps: a handler's statement never writes to a table of ours, whatever search_path it runs under
-- and however deep in a user's function it is. Handlers' transactions set hapax.in_handler. The
-- functions of this schema write as before: they are on the call stack, by their full name since
-- each sets a search_path.
CREATE FUNCTION hapax.refuse_handler() RETURNS trigger
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

DO $$
DECLARE
    name text;
BEGIN
    FOR name IN
        SELECT c.relname FROM pg_catalog.pg_class c
        WHERE c.relnamespace = 'hapax'::regnamespace AND c.relkind IN ('r', 'p')
          AND NOT c.relispartition
    LOOP
        EXECUTE format(
            'CREATE TRIGGER refuse_handler BEFORE INSERT OR UPDATE OR DELETE OR TRUNCATE ON hapax.%I '
            'FOR EACH STATEMENT WHEN (current_setting(''hapax.in_handler'', true) = ''on'') '
            'EXECUTE FUNCTION hapax.refuse_handler()', name);
    END LOOP;
END $$;

-- Handlers may run as a separate role that can only call functions here. These are the ones that a
-- node calls in a handler's session; it grants them to that role when it starts.

ALTER FUNCTION hapax.is_held(uuid, bigint) SECURITY DEFINER;
ALTER FUNCTION hapax.is_reserved(text, text, bigint) SECURITY DEFINER;
ALTER FUNCTION hapax.works_for(uuid) SECURITY DEFINER;
ALTER FUNCTION hapax.lock_marks(integer[], text[]) SECURITY DEFINER;
ALTER FUNCTION hapax.set_aside(uuid, bigint, boolean, timestamptz) SECURITY DEFINER;
ALTER FUNCTION hapax.done_all(uuid[], bigint[], text[], timestamptz) SECURITY DEFINER;
ALTER FUNCTION hapax.finish_key(text, text, bigint, integer, jsonb, bytea, timestamptz, bigint)
    SECURITY DEFINER;

REVOKE ALL ON FUNCTION hapax.refuse_handler() FROM PUBLIC;

-- Keeps: the role of handlers can do what a node needs in their sessions, and no more.
CREATE FUNCTION hapax.admit_handlers(of_role text) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    EXECUTE format('GRANT USAGE ON SCHEMA hapax TO %I', of_role);
    EXECUTE format(
        'GRANT EXECUTE ON FUNCTION '
        'hapax.is_held(uuid, bigint), '
        'hapax.is_reserved(text, text, bigint), '
        'hapax.works_for(uuid), '
        'hapax.lock_marks(integer[], text[]), '
        'hapax.set_aside(uuid, bigint, boolean, timestamptz), '
        'hapax.done_all(uuid[], bigint[], text[], timestamptz), '
        'hapax.finish_key(text, text, bigint, integer, jsonb, bytea, timestamptz, bigint), '
        'hapax.publish(text, jsonb, text, text, text, text) TO %I', of_role);
END $$;
REVOKE ALL ON FUNCTION hapax.admit_handlers(text) FROM PUBLIC;
