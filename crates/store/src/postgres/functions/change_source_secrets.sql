-- Changes the sealed secrets of one (tenant, source) pair. act: 0 set, 1 replace the sealed value and nothing
-- else, 2 delete. Returns 0 changed, 1 the set has another version, 2 there is no such pair, 3 there are as
-- many pairs as there may be.
-- Keeps: a change is applied only to the version of the set that it was decided for. The row of the
-- version is locked first, so changes of several nodes come one after the other.
CREATE OR REPLACE FUNCTION hapax.change_source_secrets(
    old_version bigint, of_tenant text, of_source text, act integer, of_secrets bytea, who text,
    reason text, acted_at timestamptz, most bigint)
RETURNS integer
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
#variable_conflict use_column
DECLARE
    is_known boolean;
BEGIN
    PERFORM FROM hapax.source_secret_version v WHERE v.version = old_version FOR UPDATE;
    IF NOT FOUND THEN
        RETURN 1;
    END IF;
    is_known := EXISTS (SELECT FROM hapax.source_secret s
                        WHERE s.tenant = of_tenant AND s.source = of_source);
    IF act <> 0 AND NOT is_known THEN
        RETURN 2;
    ELSIF act = 0 AND NOT is_known AND (SELECT count(*) FROM hapax.source_secret) >= most THEN
        RETURN 3;
    END IF;
    IF act = 0 THEN
        INSERT INTO hapax.source_secret AS s (tenant, source, secrets, set_at)
        VALUES (of_tenant, of_source, of_secrets, acted_at)
        ON CONFLICT (tenant, source)
        DO UPDATE SET secrets = excluded.secrets, set_at = excluded.set_at;
    ELSIF act = 1 THEN
        UPDATE hapax.source_secret s SET secrets = of_secrets
        WHERE s.tenant = of_tenant AND s.source = of_source;
    ELSE
        DELETE FROM hapax.source_secret s WHERE s.tenant = of_tenant AND s.source = of_source;
    END IF;
    IF act <> 1 THEN
        INSERT INTO hapax.source_secret_action (tenant, source, what, who, reason, at)
        VALUES (of_tenant, of_source, CASE act WHEN 0 THEN 'set' ELSE 'delete' END,
                change_source_secrets.who, change_source_secrets.reason, acted_at);
    END IF;
    UPDATE hapax.source_secret_version v SET version = old_version + 1;
    RETURN 0;
END $$;
