-- Keeps: the role of handlers has the rights that a node needs in their sessions, and no more.
CREATE OR REPLACE FUNCTION hapax.admit_handlers(of_role text) RETURNS void
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
