-- The charges, and a role for the app with no other rights. Run it once, after `hapax migrate up` has
-- created the schema hapax.

-- No unique constraint, on purpose: a second charge would show.
CREATE TABLE charges (
    id      text   NOT NULL,
    account text,
    amount  bigint NOT NULL,
    key     text   NOT NULL
);

CREATE ROLE charges_app LOGIN;      -- yours: with a password
-- A process that hangs in its transaction holds its key until the server ends the session.
ALTER ROLE charges_app SET idle_in_transaction_session_timeout = '20s';
ALTER ROLE charges_app SET statement_timeout = '20s';
GRANT INSERT ON charges TO charges_app;
GRANT EXECUTE ON FUNCTION
    hapax.finish(text, text, bigint, int, jsonb, bytea)
TO charges_app;
